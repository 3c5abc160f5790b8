"""Streams of OpenAI's API: an answer is sampled in slices, and each slice is sent as it comes.

A slice is a plain request for a few tokens, after the prompt and the tokens so far, which the generators'
prefix cache holds. So a stream needs nothing of the generators that other requests do not need. It takes its
turn among other requests at each slice, and ends where its client goes away. What a stream sends is whole
tokens whose text is final: no incomplete character, and nothing that may be the beginning of a stop string.
"""

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rl.errors import RunError
from rl.openai_format import event, refusal
from rl.tinker.backend import NotFound, UserError
from rl.tinker.requests import TooMany
from rl.types import Completion, StopReason

T = TypeVar("T")
SLICE_TOKENS = 16
_INCOMPLETE = "\ufffd"  # what a character decodes to before its last token
_STATUS = {UserError: 400, NotFound: 404, TooMany: 429, RunError: 500}
_log = logging.getLogger(__name__)

SampleSlice = Callable[[list[int], int, int], Awaitable[Completion]]
"""(prompt and tokens so far, most tokens, the slice's number) -> the next tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of an answer. Their text ends before a stop string."""

    completion: Completion
    text: str
    end: StopReason | None  # None: more follows


Decode = Callable[[Sequence[int]], str]


class PartialText:
    """The text of tokens that come in slices, in parts that no later token changes.

    Special tokens are not part of the text, but stop strings may be, or contain, special tokens.
    """

    def __init__(self, decode: Decode, decode_with_special: Decode, stops: Sequence[str]):
        self._decode = decode
        self._decode_with_special = decode_with_special
        self._stops = stops
        self._sent: list[int] = []  # the part before: tokenizers write some tokens by those before them
        self._held: list[int] = []

    def add(self, tokens: Sequence[int], is_end: bool) -> tuple[int, str, bool]:
        """(tokens of the next part, which may be 0; its text; whether a stop string ends it)

        is_end: no more tokens follow.
        """
        self._held += tokens
        num_tokens, whole = len(self._held), self._text(len(self._held))
        if self._stop_at(num_tokens) >= 0:
            at = 1 + bisect_left(range(1, num_tokens), True, key=lambda n: self._stop_at(n) >= 0)
            return at, self._before_stop(at), True
        text = whole
        while not is_end and num_tokens and not self._is_final(num_tokens, text, whole):
            num_tokens -= 1
            text = self._text(num_tokens)
        if num_tokens:
            self._sent, self._held = self._held[:num_tokens], self._held[num_tokens:]
        return num_tokens, text, False

    def _stop_at(self, num_tokens: int) -> int:
        """Where the first stop string begins, in the text with special tokens; -1: nowhere."""
        marked = self._marked(num_tokens)
        return min((marked.find(stop) for stop in self._stops if stop in marked), default=-1)

    def _before_stop(self, num_tokens: int) -> str:
        """The text of the first tokens that are held, up to the stop string that they have."""
        stop_at = self._stop_at(num_tokens)
        # The stop string begins in the last of so many tokens.
        begun = bisect_right(range(num_tokens), stop_at, key=lambda n: len(self._marked(n)))
        before, text = self._text(begun - 1), self._text(begun)
        is_special = text == before
        return before if is_special else text[: len(text) - (len(self._marked(begun)) - stop_at)]

    def _text(self, num_tokens: int) -> str:
        """Of the first tokens that are held."""
        return self._part(self._decode, num_tokens)

    def _marked(self, num_tokens: int) -> str:
        """The same, with special tokens."""
        return self._part(self._decode_with_special, num_tokens)

    def _part(self, decode: Decode, num_tokens: int) -> str:
        return decode([*self._sent, *self._held[:num_tokens]])[len(decode(self._sent)) :]

    def _is_final(self, num_tokens: int, text: str, whole: str) -> bool:
        starts = (stop[:length] for stop in self._stops for length in range(1, len(stop)))
        marked = self._marked(num_tokens)
        ends_open = text.endswith(_INCOMPLETE) or any(marked.endswith(start) for start in starts)
        return whole.startswith(text) and not ends_open


async def pieces(
    sample: SampleSlice,
    prompt: Sequence[int],
    max_tokens: int,
    text: PartialText,
    slice_tokens: int = SLICE_TOKENS,
) -> AsyncIterator[Piece]:
    """One answer, from its first slice to its end, of at most max_tokens."""
    tokens: list[int] = []
    held: Completion | None = None
    for number in count():
        size = min(slice_tokens, max_tokens - len(tokens))
        new = await sample([*prompt, *tokens], size, number)
        tokens += new.tokens.tolist()
        is_end = new.stop is StopReason.STOP or len(tokens) >= max_tokens or not len(new.tokens)
        held = new if held is None else _joined(held, new)
        num_tokens, final, at_stop = text.add(new.tokens.tolist(), is_end)
        end = StopReason.STOP if at_stop else new.stop if is_end else None
        if num_tokens or end is not None:
            yield Piece(_part(held, 0, num_tokens), final, end)
        if end is not None:
            return
        held = _part(held, num_tokens, len(held.tokens))


def _joined(first: Completion, second: Completion) -> Completion:
    return replace(
        second,
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        likeliest=first.likeliest + second.likeliest,
    )


def _part(completion: Completion, start: int, end: int) -> Completion:
    """Of a completion, or of some that `_joined`: the tokens from start to end."""
    return replace(
        completion,
        tokens=completion.tokens[start:end],
        logprobs=completion.logprobs[start:end],
        likeliest=completion.likeliest[start:end],
    )


async def interleaved(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """(a stream's index, its next item), as they come. Ends all streams where it ends itself."""
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:  # the reader's
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(*numbered)) for numbered in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. An error after the first one is an event, and the last one."""

    @classmethod
    async def begin(cls, records: AsyncGenerator[dict[str, Any]]) -> "EventStream":
        """Waits for the first record: an error before it is raised here, and becomes an HTTP status."""
        first = await anext(records)
        return cls(first, records)

    def __init__(self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]]):
        self._rest = rest
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(first), media_type="text/event-stream", headers=headers)

    async def _events(self, first: dict[str, Any]) -> AsyncGenerator[str]:
        yield event(first)
        try:
            async for record in self._rest:
                yield event(record)
        except Exception as error:
            status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), None)
            if status is None:
                _log.exception("a stream failed")
            yield event(refusal(status or 500, str(error) if status else f"the stream failed: {error!r}"))
            return
        yield event(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):  # also where the client is gone between two events
            await super().__call__(scope, receive, send)
