"""Requests of OpenAI's API, as they are read; what is not offered is refused by its name."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from rl.models.tokenizer import HFTokenizer
from rl.tinker.backend import UserError
from rl.tinker.openai_chat import ChatMessage, Choice, Tool
from rl.tinker.settings import check_stops

_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
}
"""What some clients always send: as good as left out."""


class TooLong(UserError):
    """A prompt leaves no room for an answer."""

    code = "context_length_exceeded"


class SamplingRequest(BaseModel):
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
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """null is as good as left out."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def limit(self) -> int | None:
        """Tokens of an answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_prompts(self) -> int:
        return 1

    def check(self, max_samples: int) -> None:
        """max_samples: of all prompts. Raises UserError."""
        for name, value in sorted((self.model_extra or {}).items()):
            if name not in _IGNORED and not (name in _NEUTRAL and value == _NEUTRAL[name]):
                raise UserError(f"{name[:80]} is not offered here; leave it out")
        for name in sorted((self.stream_options or {}).keys() - {"include_usage", "include_obfuscation"}):
            raise UserError(f"stream_options.{name[:80]} is not offered here; leave it out")
        if not 1 <= self.n * self.num_prompts <= max_samples:
            raise UserError(
                f"n={self.n} of {self.num_prompts} prompts; 1 to {max_samples} answers are offered"
            )
        if self.limit is not None and self.limit < 1:
            raise UserError(f"max_tokens={self.limit}; it has to be at least 1")
        check_stops(self.stops)


class ChatRequest(SamplingRequest):
    messages: list[ChatMessage]
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = []
    tool_choice: str | Choice | None = None
    parallel_tool_calls: bool = True

    def check(self, max_samples: int) -> None:
        super().check(max_samples)
        if self.top_logprobs and not self.logprobs:
            raise UserError(f"top_logprobs={self.top_logprobs} has no effect without logprobs=true; set it")

    @property
    def num_characters(self) -> int:
        """Of the texts that a prompt has, at the least."""
        parts = [
            part if isinstance(part, str) else part.text or ""
            for message in self.messages
            for part in ([message.content] if isinstance(message.content, str) else message.content or [])
        ]
        return sum(map(len, parts))


class CompletionsRequest(SamplingRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None

    @property
    def num_prompts(self) -> int:
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return 1 if is_one else len(self.prompt)


class Prompts:
    """Texts to tokens, in a thread beside the event loop."""

    def __init__(self, tokenizer: HFTokenizer, context_length: int):
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._max_characters = context_length * max(map(len, tokenizer.vocabulary))

    async def read(self, prompt: str | Sequence[Any]) -> list[list[int]]:
        """One prompt or several, each a text or tokens. Raises TooLong."""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        return [await self._tokens(part) for part in prompt]

    async def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return self._fits(list(prompt))
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                "the prompt has half of a surrogate pair, which is no character; leave it out"
            ) from error
        return await self.of_chat(lambda: self._tokenizer.encode(prompt), len(prompt))

    async def of_chat(self, encode: Callable[[], list[int]], num_characters: int) -> list[int]:
        """num_characters: which the text has at the least. Raises TooLong."""
        if num_characters > self._max_characters:
            raise TooLong(f"a prompt of {num_characters} characters, more than {self._context_length} tokens")
        return self._fits(await asyncio.to_thread(encode))

    def _fits(self, tokens: list[int]) -> list[int]:
        if not 0 < len(tokens) < self._context_length:
            raise TooLong(f"a prompt of {len(tokens)} tokens; it has to have 1 to {self._context_length - 1}")
        return tokens
