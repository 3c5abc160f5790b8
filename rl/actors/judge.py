"""JudgeServer: a run's own judge, generators whose weights stay, as an OpenAI-compatible URL on loopback."""

import asyncio
import json
import secrets
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl.actors.generator import GeneratorProcesses
from rl.actors.remote import ProcessDied, quietly
from rl.actors.replica import Pool, Replica
from rl.envs.judge import OWN_KEY, OWN_URL
from rl.errors import ConfigError, RunError, one_line
from rl.host_protocol import listen
from rl.http_server import Server, unless_gone, url_of
from rl.models.tokenizer import HFTokenizer
from rl.openai_format import answer, choice, refusal
from rl.types import Completion, SamplingParams

JudgeReplica = Replica[GeneratorProcesses]
_MODEL = "judge"
_MAX_DEATHS = 3  # of one request


class _Described(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = ""
    description: str = ""
    strict: bool | None = None
    form: dict[str, Any] = Field(alias="schema")


class _Format(BaseModel):
    """OpenAI's response_format, by which a reply is held to a JSON schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_schema"]
    json_schema: _Described | None = None

    @property
    def schema_text(self) -> str:
        """As generators take it; empty where any text will do."""
        return json.dumps(self.json_schema.form) if self.json_schema else ""

    @model_validator(mode="after")
    def _is_whole(self) -> "_Format":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("give json_schema where the type is json_schema, and only there")
        if self.json_schema is not None:
            try:
                Draft202012Validator.check_schema(self.json_schema.form)
            except SchemaError as error:
                raise ValueError(f"json_schema.schema is no JSON schema: {error.message:.200}") from error
        return self


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]]
    model: str = _MODEL
    max_tokens: Annotated[int, Ge(1)] | None = None
    max_completion_tokens: Annotated[int, Ge(1)] | None = None
    temperature: Annotated[float, Ge(0), Le(100)] = 1.0
    top_p: Annotated[float, Ge(1e-6), Le(1)] = 1.0
    seed: int = 0
    n: Annotated[int, Ge(1), Le(64)] = 1
    user: str = ""
    response_format: _Format | None = None


class JudgeServer:
    """It answers as soon as a judge serves. For one event loop."""

    def __init__(
        self, pool: Pool[JudgeReplica], tokenizer: HFTokenizer, max_tokens: int, address: str = "127.0.0.1"
    ):
        """max_tokens: of a question with its answer. address: of this process, as who asks reaches it."""
        self.pool = pool
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._listener = listen(address, backlog=2048)
        self._key = secrets.token_urlsafe(16)
        self._keys = count()  # of requests
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes that may ask it."""
        return {OWN_URL: f"{url_of(self._listener)}/v1", OWN_KEY: self._key}

    async def run(self) -> None:
        """Keep the judges alive and answer, until cancelled."""
        app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])
        server = Server.of(app)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            await self.pool.run()
            await asyncio.Event().wait()  # all are dead for good, which who asks is told
        finally:
            server.stop_now()
            await serving

    async def _chat(self, request: Request) -> Response:
        authorization = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(authorization, f"Bearer {self._key}".encode()):
            return _refusal(401, "the API key is not this run's")
        try:
            asked = _Asked.model_validate_json(await request.body())
        except ValidationError as error:
            wrong = error.errors()[0]
            return _refusal(400, f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}")
        try:
            prompt = self._tokenizer.encode_messages(asked.messages)
        except Exception as error:  # the template is a program
            return _refusal(400, f"the judge's chat template fails: {one_line(error):.200}")
        room = self._max_tokens - len(prompt)
        if room < 1:
            problem = f"a question of {len(prompt)} tokens; raise judge.max_tokens={self._max_tokens}"
            return _refusal(400, problem)
        wanted = asked.max_completion_tokens or asked.max_tokens or room
        params = SamplingParams(
            min(wanted, room),
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed % 2**31,
            stop_token_ids=(self._tokenizer.eos_id,),
            json_schema=asked.response_format.schema_text if asked.response_format else "",
        )
        try:
            return await unless_gone(request, self._graded(prompt, asked.n, params))
        except ProcessDied as error:
            return _refusal(503, str(error))
        except (RunError, ConfigError) as error:
            return _refusal(500, str(error))

    async def _graded(self, prompt: Sequence[int], n: int, params: SamplingParams) -> Response:
        async def of(replica: JudgeReplica) -> list[Completion]:
            return await replica.ask(lambda processes: self._sample(processes, prompt, n, params), load=n)

        completions = await self.pool.ask(of, max_deaths=_MAX_DEATHS)
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        return JSONResponse(answer("chat.completion", _MODEL, prompt, completions, choices, False))

    async def _sample(
        self, processes: GeneratorProcesses, prompt: Sequence[int], n: int, params: SamplingParams
    ) -> list[Completion]:
        """Where nobody waits for it any more the generator ends it: it would hold up what is asked next."""
        key = next(self._keys)
        try:
            return await processes.sample(prompt, n, params, key=key)
        except asyncio.CancelledError:
            ending = asyncio.create_task(quietly(processes.give_up_samples([key])))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text = self._tokenizer.decode(completion.tokens.tolist()).strip()
        return choice(index, completion, False) | {"message": {"role": "assistant", "content": text}}


def _refusal(status: int, message: str) -> Response:
    return JSONResponse(refusal(status, message), status)
