"""Sampling: requests for samples, all at the same time; the generators batch them."""

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from rl.errors import RunError
from rl.tinker import wire
from rl.tinker.backend import Backend, UserError
from rl.tinker.database import Database, samplers
from rl.tinker.prompt_scores import PromptScores
from rl.tinker.rate import Rate
from rl.tinker.requests import Requests
from rl.types import Completion, SamplingParams

_MAX_LIKELIEST = 20
_log = logging.getLogger(__name__)


class Sampling:
    def __init__(
        self,
        database: Database,
        queue: Requests,
        backend: Backend,
        root: Path,
        eos_ids: tuple[int, ...],
        max_samples: int,
    ):
        """eos_ids: what ends a sample where the request says nothing else."""
        self._database = database
        self._queue = queue
        self._backend = backend
        self._root = root
        self._eos_ids = eos_ids
        self._max_samples = max_samples
        self._running: dict[str, asyncio.Task[None]] = {}
        self.tokens = Rate()

    def check(self, body: Mapping[str, Any]) -> None:
        """body: of asample. Raises UserError."""
        prompt, params = self._read(body)
        self._scores(body, prompt, params)

    def submit(self, request: Row) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._running[request.id] = task
        task.add_done_callback(lambda _: self._running.pop(request.id, None))

    async def sample(self, directory: str | None, body: Mapping[str, Any]) -> list[Completion]:
        """body: as of asample. directory: of an adapter, as rows name it. Raises UserError."""
        prompt, params = self._read(body)
        completions = await self._sample_with(directory, prompt, body["num_samples"], params)
        self.tokens.add(sum(len(completion.tokens) for completion in completions))
        scored = body.get("prompt_logprobs_last_n")
        return [_scored_at_the_end(c, scored) for c in completions] if scored else completions

    async def _sample_with(
        self, directory: str | None, prompt: Sequence[int], n: int, params: SamplingParams
    ) -> list[Completion]:
        try:
            return await self._backend.sample(self._adapter(directory), prompt, n, params)
        except Exception:
            self._adapter(directory)  # raises UserError where it was deleted meanwhile
            raise

    def _adapter(self, directory: str | None) -> Path | None:
        if directory is None:
            return None
        if not (self._root / directory).is_dir():
            raise UserError("these weights were deleted; create another sampling session")
        return self._root / directory

    def cancel(self, request: Row) -> None:
        """One that nobody waits for any more."""
        task = self._running.get(request.id)
        if task is not None and task.cancel():
            self._queue.failed(request, "the request was cancelled", "user")

    async def _answer(self, request: Row) -> None:
        try:
            body = json.loads(request.body)
            sampler = self._database.get(samplers, request.target)
            if sampler is None:
                raise UserError("its sampling session is over; create another")
            own = partial(self._sample_with, sampler.directory)
            scores = self._scores(body, *self._read(body))
            completions, scored = await asyncio.gather(
                self.sample(sampler.directory, body), scores.compute(own)
            )
            top, of_prompt = body.get("topk_sample_logprobs") or 0, body.get("topk_prompt_logprobs") or 0
            written = wire.write_samples(completions, top, of_prompt, scored)
            self._queue.done(request, written, wire.PROTOBUF)
        except UserError as error:
            self._queue.failed(request, str(error), "user", refused=True)
        except RunError as error:
            self._queue.failed(request, str(error), "server")
        except Exception as error:
            _log.exception("request %s failed", request.id)
            self._queue.failed(request, f"sampling failed: {error!r}", "server")

    def _read(self, body: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
        asked = body["sampling_params"]
        prompt: list[int] = []
        for chunk in body["prompt"]["chunks"]:
            if chunk.get("type") != "encoded_text":
                raise UserError(f"a chunk of type {chunk.get('type')!r}; only encoded_text is offered here")
            prompt += chunk["tokens"]
        room = self._backend.context_length - len(prompt)
        if not prompt or room < 1:
            raise UserError(
                f"a prompt of {len(prompt)} tokens; it has to have 1 to {self._backend.context_length - 1}"
            )
        if min(prompt) < 0 or max(prompt) >= self._backend.vocab_size:
            raise UserError(f"the prompt has a token outside the vocabulary of {self._backend.vocab_size}")
        if not 1 <= body["num_samples"] <= self._max_samples:
            raise UserError(f"num_samples={body['num_samples']}; it has to be 1 to {self._max_samples}")
        wanted = asked.get("max_tokens")
        if wanted is not None and wanted < 1:
            raise UserError(f"max_tokens={wanted}; it has to be at least 1")
        temperature, top_p, top_k = asked["temperature"], asked["top_p"], asked["top_k"]
        if not 0 <= temperature <= 100 or not 0 < top_p <= 1 or (top_k < 1 and top_k != -1):
            raise UserError(
                f"temperature={temperature}, top_p={top_p}, top_k={top_k}: "
                f"use 0 to 100, over 0 to 1, -1 or over 0"
            )
        likeliest = body.get("topk_sample_logprobs") or 0
        of_prompt = body.get("topk_prompt_logprobs") or 0
        if not 0 <= likeliest <= _MAX_LIKELIEST or not 0 <= of_prompt <= _MAX_LIKELIEST:
            raise UserError(f"at most {_MAX_LIKELIEST} of the likeliest tokens are offered here")
        last = body.get("prompt_logprobs_last_n")
        if last is not None and (not body.get("prompt_logprobs") or not 1 <= last < len(prompt)):
            raise UserError(
                f"prompt_logprobs_last_n={last}; it has to be 1 to {len(prompt) - 1}, with prompt_logprobs"
            )
        token_ids, texts = self._stops(asked.get("stop"))
        seed = asked.get("seed")
        return prompt, SamplingParams(
            max_new_tokens=min(wanted or room, room),
            temperature=temperature,
            seed=secrets.randbits(31) if seed is None else seed % 2**31,
            stop_token_ids=token_ids,
            top_k=top_k,
            top_p=top_p,
            stop_texts=texts,
            ignore_eos=True,
            num_likeliest=likeliest,
            prompt_likeliest=of_prompt if body.get("prompt_logprobs") or of_prompt else None,
        )

    def _scores(self, body: Mapping[str, Any], prompt: Sequence[int], params: SamplingParams) -> PromptScores:
        return PromptScores(body, prompt, params, self._backend.vocab_size)

    def _stops(self, stop: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """None: at EOS; nothing: nowhere; else there, and at EOS."""
        if stop is None:
            return self._eos_ids, ()
        stop = [stop] if isinstance(stop, str) else list(stop)
        if not stop:
            return (), ()
        texts = tuple(s for s in stop if isinstance(s, str))
        if any(not text for text in texts):
            raise UserError("an empty stop string would end every sample at once; leave it out")
        return (*self._eos_ids, *(s for s in stop if isinstance(s, int))), texts


def _scored_at_the_end(completion: Completion, count: int) -> Completion:
    """With scores of the prompt's last `count` tokens alone."""
    own, likeliest = completion.prompt_logprobs, completion.prompt_likeliest
    unscored = len(own) - count
    return replace(
        completion,
        prompt_logprobs=(None,) * unscored + own[unscored:],
        prompt_likeliest=((),) * unscored + likeliest[unscored:] if likeliest else (),
    )
