"""OpenAI's completions, for evaluation tools: any client of theirs samples the base model or a checkpoint.

The model's name is a base model's, or a checkpoint's tinker:// path. With `return_token_ids`, choices carry
their token ids and, with `logprobs`, each token's logprob.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict

from rl.models.tokenizer import HFTokenizer
from rl.tinker.backend import UserError
from rl.tinker.service import Service
from rl.types import Completion, StopReason

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
            choice = _choice(i, completion, body)
            choice["text"] = tokenizer.decode(completion.tokens)
            if top is not None:
                choice["logprobs"] = {
                    "tokens": [tokenizer.decode([token]) for token in completion.tokens],
                    "token_logprobs": completion.logprobs,
                    "top_logprobs": [
                        {tokenizer.decode([token]): logprob for token, logprob in place}
                        for place in completion.likeliest
                    ],
                }
            choices.append(choice)
        return _answer("text_completion", "cmpl", body, prompt, found, choices)

    @api.post("/chat/completions")
    async def chat(body: _Chat, request: Request) -> Any:
        prompt = _prompt_of(tokenizer, body.messages)
        top = body.top_logprobs or 0
        found = await _sample(request, body, prompt, top)
        choices = []
        for i, completion in enumerate(found):
            choice = _choice(i, completion, body)
            choice["message"] = {"role": "assistant", "content": tokenizer.decode(completion.tokens)}
            if body.logprobs:
                likeliest: Sequence[Any] = completion.likeliest or [()] * len(completion.tokens)
                choice["logprobs"] = {
                    "content": [
                        {
                            **_token(tokenizer, token, logprob),
                            "top_logprobs": [_token(tokenizer, *pair) for pair in place],
                        }
                        for token, logprob, place in zip(
                            completion.tokens, completion.logprobs, likeliest, strict=True
                        )
                    ]
                }
            choices.append(choice)
        return _answer("chat.completion", "chatcmpl", body, prompt, found, choices)

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


def _token(tokenizer: HFTokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _choice(index: int, completion: Completion, body: _Request) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None}
    choice["finish_reason"] = "stop" if completion.stop == StopReason.STOP else "length"
    return choice | ({"token_ids": completion.tokens} if body.return_token_ids else {})


def _answer(
    kind: str, prefix: str, body: _Request, prompt: Sequence[int], found: list[Completion], choices: list[Any]
) -> dict[str, Any]:
    sampled = sum(len(completion.tokens) for completion in found)
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": sampled,
        "total_tokens": len(prompt) + sampled,
    }
    answer = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
    answer |= {"model": body.model, "choices": choices, "usage": usage}
    return answer | ({"prompt_token_ids": list(prompt)} if body.return_token_ids else {})
