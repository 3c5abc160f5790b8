"""What a request asks of each place of its prompt: logprobs of tokens that it names, and tokens drawn there.

Each is a request of its own for one token, and the generators batch them. vLLM 0.32 can score named tokens
itself, but then returns no likeliest tokens to any other request of the batch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.tinker.backend import UserError
from rl.types import Completion, SamplingParams
from rl.waiting import results_of

_MOST = 1024  # tokens of a request, of either kind
_AT_ONCE = 16
_NO_TOKEN = -1  # of a cell that is not scored
_APART = 1_000_003  # seeds of neighbouring places
Sample = Callable[[Sequence[int], int, SamplingParams], Awaitable[list[Completion]]]


@dataclass(frozen=True, slots=True)
class Scores:
    """[P, K] each, for the P places after a prompt's first token."""

    targets: Mapping[str, Any] | None = None  # TensorData laid out as in the request; its data: logprobs
    drawn: tuple[np.ndarray, np.ndarray] | None = None  # tokens, and their logprobs


class PromptScores:
    """Raises UserError where the request is none. body: of asample."""

    def __init__(
        self, body: Mapping[str, Any], prompt: Sequence[int], params: SamplingParams, vocab_size: int
    ):
        self._prompt = list(prompt)
        self._params = params
        self._targets: Mapping[str, Any] | None = body.get("target_prompt_logprobs") or None
        self._rows = _rows(self._targets, len(prompt) - 1, vocab_size) if self._targets else []
        self._num_drawn = body.get("prompt_alt_tokens_k") or 0
        num_drawn = self._num_drawn * (len(prompt) - 1)
        cells = zip(self._rows, self._targets["data"] if self._targets else (), strict=True)
        self._scored_rows = [row for row, token in cells if token != _NO_TOKEN]
        num_scored = len(self._scored_rows)
        if self._num_drawn < 0 or max(num_drawn, num_scored) > _MOST:
            raise UserError(
                f"{num_scored} tokens to score and {num_drawn} to draw along the prompt; at most {_MOST} of "
                f"either are offered in one request"
            )

    @property
    def num_tokens(self) -> int:
        """That generators compute. A score reads its prompt anew; what is drawn finds it in their cache."""
        return sum(row + 2 for row in self._scored_rows) + self._num_drawn * (len(self._prompt) - 1)

    async def compute(self, sample: Sample) -> Scores:
        """A few of its requests are under way at a time, beside those of others."""
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def in_turn(prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
            async with at_once:
                return await sample(prompt, n, params)

        targets, drawn = await results_of([self._score(in_turn), self._draw(in_turn)])
        return Scores(targets, drawn)

    async def _score(self, sample: Sample) -> Mapping[str, Any] | None:
        if self._targets is None:
            return None

        async def of(row: int, token: int) -> float:
            if token == _NO_TOKEN:
                return 0.0
            params = SamplingParams(1, prompt_likeliest=0, ignore_eos=True, seed=0)
            (completion,) = await sample([*self._prompt[: row + 1], token], 1, params)
            logprob = completion.prompt_logprobs[-1]
            assert logprob is not None  # only a prompt's first token has none
            return logprob

        cells = zip(self._rows, self._targets["data"], strict=True)
        return {**self._targets, "data": await results_of(of(row, token) for row, token in cells)}

    async def _draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray] | None:
        if not self._num_drawn:
            return None

        async def at(row: int) -> list[Completion]:
            seed = (self._params.seed + _APART * (row + 1)) % 2**31
            params = SamplingParams(1, temperature=self._params.temperature, ignore_eos=True, seed=seed)
            return await sample(self._prompt[: row + 1], self._num_drawn, params)

        places = await results_of(map(at, range(len(self._prompt) - 1)))
        tokens = [[completion.tokens[0] for completion in place] for place in places]
        logprobs = [[completion.logprobs[0] for completion in place] for place in places]
        shape = len(places), self._num_drawn
        return np.array(tokens, np.int64).reshape(shape), np.array(logprobs, np.float32).reshape(shape)


def _rows(tensor: Mapping[str, Any], num_rows: int, vocab_size: int) -> list[int]:
    """Of each of the tensor's data."""
    data, shape = tensor["data"], tensor.get("shape") or []
    row_ends, columns = tensor.get("sparse_crow_indices"), tensor.get("sparse_col_indices")
    if len(shape) != 2 or shape[0] != num_rows or shape[1] < 1 or tensor["dtype"] != "int64":
        raise UserError(
            f"target_prompt_logprobs has to be int64 of [{num_rows}, K], one row a token after the first"
        )
    if any(not isinstance(token, int) or not -1 <= token < vocab_size for token in data):
        raise UserError(f"target_prompt_logprobs has a token that is neither -1 nor one of {vocab_size}")
    if row_ends is None and columns is None:
        if len(data) != shape[0] * shape[1]:
            raise UserError(f"target_prompt_logprobs has {len(data)} tokens, and the shape {shape}")
        return [i // shape[1] for i in range(len(data))]
    row_ends, columns = row_ends or [], columns or []
    counts = np.diff(np.array(row_ends, np.int64)) if len(row_ends) == num_rows + 1 else np.array([-1])
    in_order = (counts >= 0).all() and row_ends[0] == 0 and row_ends[-1] == len(data) == len(columns)
    if not in_order or any(not 0 <= column < shape[1] for column in columns):
        raise UserError("target_prompt_logprobs is not a sparse tensor in CSR form")
    return np.repeat(np.arange(num_rows), counts).tolist()
