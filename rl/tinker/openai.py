"""OpenAI's completions, for evaluation tools: any client of theirs samples the base model or a checkpoint.

The model's name is a base model's, or a checkpoint's tinker:// path. With `return_token_ids`, choices carry
their token ids and, with `logprobs`, each token's logprob.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict

from rl.models.tokenizer import HFTokenizer
from rl.openai_format import answer, chat_logprobs, choice
from rl.tinker.backend import UserError
from rl.tinker.service import Service
from rl.types import Completion

_IGNORED = ("user", "metadata", "store", "stream_options", "service_tier")


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    return_token_ids: bool = False


class _Chat(_Request):
    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None


class _Completions(_Request):
    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool = False


def add_openai_routes(app: FastAPI, service: Service, tokenizer: HFTokenizer) -> None:
    api = APIRouter(prefix="/v1")

    @api.get("/models")
    async def models(request: Request) -> Any:
        paths = [row.path for row in service.checkpoints.list(request.state.tenant)]
        names = [*service.model_names, *paths]
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "owned_by": "rl"} for name in names],
        }

    @api.post("/completions")
    async def completions(body: _Completions, request: Request) -> Any:
        prompt = tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        if body.echo:
            raise UserError("echo is not offered here")
        top = body.logprobs
        found = await _sample(request, body, prompt, top or 0)
        choices = []
        for i, completion in enumerate(found):
            made = choice(i, completion, body.return_token_ids)
            made["text"] = tokenizer.decode(completion.tokens.tolist())
            if top is not None:
                made["logprobs"] = {
                    "tokens": [tokenizer.decode([token]) for token in completion.tokens.tolist()],
                    "token_logprobs": completion.logprobs.tolist(),
                    "top_logprobs": [
                        {tokenizer.decode([token]): logprob for token, logprob in place}
                        for place in completion.likeliest
                    ],
                }
            choices.append(made)
        return answer("text_completion", body.model, prompt, found, choices, body.return_token_ids)

    @api.post("/chat/completions")
    async def chat(body: _Chat, request: Request) -> Any:
        prompt = _prompt_of(tokenizer, body.messages)
        top = body.top_logprobs or 0
        found = await _sample(request, body, prompt, top)
        choices = []
        for i, completion in enumerate(found):
            made = choice(i, completion, body.return_token_ids)
            made["message"] = {"role": "assistant", "content": tokenizer.decode(completion.tokens.tolist())}
            if body.logprobs:
                made["logprobs"] = chat_logprobs(tokenizer, completion)
            choices.append(made)
        return answer("chat.completion", body.model, prompt, found, choices, body.return_token_ids)

    async def _sample(
        request: Request, body: _Request, prompt: Sequence[int], num_likeliest: int
    ) -> list[Completion]:
        unknown = sorted(set(body.model_extra or {}) - set(_IGNORED))
        if body.stream or unknown:
            raise UserError(f"{'stream' if body.stream else unknown[0]} is not offered here")
        asked = {
            "num_samples": body.n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "topk_sample_logprobs": num_likeliest,
            "sampling_params": {
                "max_tokens": body.max_completion_tokens or body.max_tokens,
                "seed": body.seed,
                "stop": body.stop,
                "temperature": body.temperature,
                "top_k": body.top_k,
                "top_p": body.top_p,
            },
        }
        return await service.sample_now(request.state.tenant, body.model, asked)

    app.include_router(api)


def _prompt_of(tokenizer: HFTokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Raises UserError where the model's chat template does not take them."""
    if why := tokenizer.why_no_chat():
        raise UserError(f"the model {why}; use /v1/completions")
    try:
        return tokenizer.encode_messages(messages)
    except Exception as error:  # the template is a program
        raise UserError(f"the model's chat template does not take these messages: {error}") from error
