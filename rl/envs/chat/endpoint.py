"""AgentEndpoint: the policy as an OpenAI-compatible endpoint; an episode's key is its session.

So an agent in any library, language or virtual environment is trained as it is. A request that the client
sends again gets the same answer; an answer that nobody got is not learned from; settings that would sample
another policy than the one that learns are refused.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl.envs.chat.requests import Refused, TurnRequest, read_request
from rl.envs.chat.session import ChatSession, NoTurnsLeft, TooLong, Turn, Unwritable
from rl.errors import RunError
from rl.host_protocol import listen
from rl.http_server import Server, url_of
from rl.interfaces import Tokenizer
from rl.openai_format import answer, chat_logprobs, choice, event, refusal
from rl.types import Message
from rl.waiting import within

_MODEL = "policy"
_RETRY = "x-stainless-retry-count"
_START_SECONDS = 10.0


@dataclass
class _Guest:
    """A session at the door."""

    session: ChatSession
    answers: dict[str, asyncio.Task[Turn]] = field(default_factory=dict)  # request -> its last answer
    sampling: set[asyncio.Task[Turn]] = field(default_factory=set)  # all that are under way
    delivered: set[int] = field(default_factory=set)  # turns that reached the client
    messages: Sequence[Message] = ()


class AgentEndpoint:
    """A Door (rl/interfaces.py). Listens from the first session until `close`. For one event loop."""

    def __init__(self, tokenizer: Tokenizer, address: str = "127.0.0.1"):
        """address: of this process, as agents reach it."""
        self._tokenizer = tokenizer
        self._address = address
        self._guests: dict[str, _Guest] = {}
        self._serving: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._url = ""

    async def enter(self, session: ChatSession) -> tuple[str, str]:
        if self._server is None:
            listener = listen(self._address, backlog=2048)
            self._url = f"{url_of(listener)}/v1"
            self._server = Server.of(self._app())
            self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        async with within(_START_SECONDS):
            while not self._server.started:
                await asyncio.sleep(0.01)
        key = secrets.token_urlsafe(16)
        self._guests[key] = _Guest(session)
        return self._url, key

    async def leave(self, key: str) -> Sequence[Message]:
        guest = self._guests.pop(key)
        for task in guest.sampling:
            task.cancel()
        await asyncio.gather(*guest.sampling, return_exceptions=True)  # none adds a turn from now on
        for turn in [turn for turn in guest.session.turns if id(turn) not in guest.delivered]:
            guest.session.forget(turn)
        return guest.messages

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.stop_now()
            await self._serving

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/{path:path}", self._nothing, methods=["GET", "POST"]),
        ]
        return Starlette(routes=routes)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": _MODEL, "object": "model", "owned_by": "rl"}]})

    async def _nothing(self, request: Request) -> Response:
        why = f"{request.url.path[:80]} is not offered: the policy answers at /v1/chat/completions"
        return JSONResponse(refusal(404, why, None), 404)

    async def _chat(self, request: Request) -> Response:
        try:
            guest = self._guest(request)
            asked = read_request(await request.body())
            turn = await self._turn(guest, asked, is_retry=request.headers.get(_RETRY, "0") != "0")
        except Refused as error:
            return JSONResponse(refusal(error.status, str(error), error.code or None), error.status)
        if not await request.is_disconnected():
            guest.session.deliver(turn)
            guest.delivered.add(id(turn))
            guest.messages = [*guest.session.as_told(asked.messages, asked.tools or ()), turn.message]
        body = self._written(turn, asked)
        if not asked.stream:
            return JSONResponse(body)
        return Response(_as_events(body), media_type="text/event-stream")

    def _guest(self, request: Request) -> _Guest:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key not in self._guests:
            raise Refused(401, "the API key is none of an episode that is under way")
        return self._guests[key]

    async def _turn(self, guest: _Guest, asked: TurnRequest, is_retry: bool) -> Turn:
        key = json.dumps([asked.messages, asked.tools], sort_keys=True)
        task = guest.answers.get(key) if is_retry else None
        if task is None:
            sampling = guest.session.sample(asked.messages, asked.tools or (), asked.limit)
            task = guest.answers[key] = asyncio.create_task(sampling)
            guest.sampling.add(task)
            task.add_done_callback(guest.sampling.discard)
        try:
            return await asyncio.shield(task)
        except TooLong as error:
            # Libraries know a full context by OpenAI's words.
            message = f"This model's maximum context length is exceeded: {error}"
            raise Refused(400, message, "context_length_exceeded") from None
        except NoTurnsLeft as error:
            raise Refused(400, str(error), "turns_used_up") from None
        except (Unwritable, RunError) as error:
            raise Refused(400, str(error)) from None

    def _written(self, turn: Turn, asked: TurnRequest) -> dict[str, Any]:
        with_ids = bool(asked.return_token_ids)
        chat_choice = choice(0, turn.completion, with_ids)
        # Without tools an answer is what was written, thoughts included, as of a server without a parser.
        verbatim = {"role": "assistant", "content": turn.written}
        chat_choice["message"] = dict(turn.message) if asked.tools else verbatim
        if turn.message.get("tool_calls"):
            chat_choice["finish_reason"] = "tool_calls"
        if asked.logprobs:
            chat_choice["logprobs"] = chat_logprobs(self._tokenizer, turn.completion)
        prompt = turn.tokens[: -len(turn.completion.tokens) or None]
        return answer("chat.completion", _MODEL, prompt, [turn.completion], [chat_choice], with_ids)


def _as_events(body: Mapping[str, Any]) -> str:
    """The whole answer as one chunk of a stream."""
    choices = []
    for whole in body["choices"]:
        calls = [{"index": i, **c} for i, c in enumerate(whole["message"].get("tool_calls", ()))]
        delta = {**whole["message"], **({"tool_calls": calls} if calls else {})}
        choices.append({**{k: v for k, v in whole.items() if k != "message"}, "delta": delta})
    chunk = {**body, "object": "chat.completion.chunk", "choices": choices}
    return event(chunk) + event(None)
