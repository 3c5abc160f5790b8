"""Answers as OpenAI's API writes them, for every endpoint of ours that speaks it."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from rl.interfaces import Tokenizer
from rl.types import Completion, Likeliest, StopReason


def choice(index: int, completion: Completion, with_token_ids: bool) -> dict[str, Any]:
    """Without its message or text."""
    made: dict[str, Any] = {"index": index, "logprobs": None}
    made["finish_reason"] = "stop" if completion.stop == StopReason.STOP else "length"
    return made | ({"token_ids": completion.tokens.tolist()} if with_token_ids else {})


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
    text = tokenizer.decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def answer(
    kind: str,
    model: str,
    prompt: Sequence[int],
    completions: Sequence[Completion],
    choices: Sequence[dict[str, Any]],
    with_token_ids: bool,
) -> dict[str, Any]:
    """kind: text_completion or chat.completion."""
    sampled = sum(len(completion.tokens) for completion in completions)
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": sampled,
        "total_tokens": len(prompt) + sampled,
    }
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    made = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
    made |= {"model": model, "choices": list(choices), "usage": usage}
    return made | ({"prompt_token_ids": list(prompt)} if with_token_ids else {})
