"""Answers as OpenAI's API writes them, for every endpoint of ours that speaks it."""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl.interfaces import Tokenizer
from rl.types import Completion, Likeliest, StopReason

_LOWEST_LOGPROB = -9999.0  # as vLLM's own server writes it


def choice(index: int, completion: Completion, with_token_ids: bool) -> dict[str, Any]:
    """Without its message or text."""
    record: dict[str, Any] = {"index": index, "logprobs": None}
    record["finish_reason"] = "stop" if completion.stop == StopReason.STOP else "length"
    return record | ({"token_ids": completion.tokens.tolist()} if with_token_ids else {})


def chat_logprobs(tokenizer: Tokenizer, completion: Completion) -> dict[str, Any]:
    """Of each sampled token, and of the likeliest in its place."""
    likeliest: Sequence[Likeliest] = completion.likeliest or [()] * len(completion.tokens)
    return {
        "content": [
            {
                **_token(tokenizer, token, logprob),
                "top_logprobs": [_token(tokenizer, *pair) for pair in place],
            }
            for token, logprob, place in zip(
                completion.tokens.tolist(), completion.logprobs.tolist(), likeliest, strict=True
            )
        ]
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    """JSON has no infinity, which is the logprob of a token that a schema forbids."""
    return max(logprob, _LOWEST_LOGPROB)


def _text(data: bytes) -> str:
    """A token's; of a part of a character its bytes, as OpenAI's API writes them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def text_logprobs(tokenizer: Tokenizer, completion: Completion) -> dict[str, Any]:
    """As `chat_logprobs`, in the form of text completions."""

    def text(token: int) -> str:
        return _text(tokenizer.token_bytes(token))

    return {
        "tokens": [text(token) for token in completion.tokens.tolist()],
        "token_logprobs": list(map(_finite, completion.logprobs.tolist())),
        "top_logprobs": [
            _of_likelier((text(token), logprob) for token, logprob in place) for place in completion.likeliest
        ],
    }


def _of_likelier(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Where tokens have one text, the logprob of the likeliest, which comes first."""
    merged: dict[str, float] = {}
    for text, logprob in pairs:
        merged.setdefault(text, _finite(logprob))
    return merged


def head(kind: str, model: str) -> dict[str, Any]:
    """What an answer, or each chunk of a stream, begins with.

    kind: text_completion, chat.completion or chat.completion.chunk.
    """
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    id = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """In tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def answer(
    kind: str,
    model: str,
    prompt: Sequence[int],
    completions: Sequence[Completion],
    choices: Sequence[dict[str, Any]],
    with_token_ids: bool,
) -> dict[str, Any]:
    """Of one prompt. kind: text_completion or chat.completion."""
    sampled = sum(len(completion.tokens) for completion in completions)
    whole = head(kind, model) | {"choices": list(choices), "usage": usage(len(prompt), sampled)}
    return whole | ({"prompt_token_ids": list(prompt)} if with_token_ids else {})


_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


def refusal(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The body of an answer with this HTTP status, of which 500 and over is no fault of the client's."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code or _CODES.get(status)}
    return {"error": error}


def event(record: Mapping[str, Any] | None) -> str:
    """A record of a stream as a server-sent event; None is its end."""
    return f"data: {'[DONE]' if record is None else json.dumps(record)}\n\n"
