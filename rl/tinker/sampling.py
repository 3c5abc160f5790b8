"""Sampling: requests for samples, all at the same time; the generators batch them."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from rl.errors import RunError
from rl.tinker import wire
from rl.tinker.backend import Backend, ContextExceeded, GeneratorsDied, UserError
from rl.tinker.blame import Blame
from rl.tinker.database import Database, samplers
from rl.tinker.limits import Limits
from rl.tinker.prompt_scores import PromptScores
from rl.tinker.rate import Rate
from rl.tinker.requests import Requests
from rl.tinker.sample_scheduler import Place, Sample, SampleScheduler
from rl.tinker.sampling_queue import Load
from rl.tinker.settings import check_sampling
from rl.types import Completion, SamplingParams
from rl.waiting import results_of

_MAX_LIKELIEST = 20
_DEATHS = 2  # of generators or the server, after which a request is tried alone
_log = logging.getLogger(__name__)


class Sampling:
    """Requests for samples, of every tenant: kept ones, and those of OpenAI's routes."""

    def __init__(
        self,
        database: Database,
        queue: Requests,
        backend: Backend,
        root: Path,
        eos_ids: tuple[int, ...],
        limits: Limits,
        scheduler: SampleScheduler,
        blame: Blame,
    ):
        """eos_ids: what ends a sample where the request says nothing else."""
        self._database = database
        self._queue = queue
        self._backend = backend
        self._root = root
        self._eos_ids = eos_ids
        self._max_samples = limits.max_samples
        self._scheduler = scheduler
        self._blame = blame
        self._alone = asyncio.Lock()  # of requests with which a generator, or the server, died twice
        self._running: dict[str, asyncio.Task[None]] = {}
        self.tokens = Rate()

    def check(self, tenant: str, body: Mapping[str, Any]) -> Load:
        """body: of asample. Raises UserError, and TooMany."""
        load = self._load(body)
        self._blame.check(tenant)
        self._scheduler.check(tenant, load.num_samples)
        return load

    def _load(self, body: Mapping[str, Any]) -> Load:
        """Raises UserError."""
        prompt, params = self._read(body)
        num_tokens = len(prompt) + self._scores(body, prompt, params).num_tokens
        return Load(body["num_samples"], num_tokens, params.max_new_tokens)

    def submit(self, request: Row, load: Load) -> None:
        place = self._scheduler.enter(request.tenant, load)
        task = asyncio.get_running_loop().create_task(self._answer(request, place))
        self._running[request.id] = task
        task.add_done_callback(lambda _: self._end(request, place))

    def _end(self, request: Row, place: Place) -> None:
        place.leave()
        self._running.pop(request.id, None)

    def resume(self, request: Row) -> None:
        """What waited, or ran, when the server ended."""
        try:
            self.submit(request, self._load(json.loads(self._queue.body(request))))
        except UserError as error:  # this server's model or limits are others
            self._queue.failed(request, str(error), "user", refused=True)

    async def stop(self) -> None:
        """The server ends in good order: what waits or runs goes on at the next start."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sample(self, tenant: str, directory: str | None, body: Mapping[str, Any]) -> list[Completion]:
        """body: as of asample. directory: of an adapter, as rows name it. Raises UserError, and TooMany."""
        place = self._scheduler.enter(tenant, self.check(tenant, body))
        try:
            await place.wait()
            return await self._sample(place, self._with(tenant, directory, _DEATHS), body)
        finally:
            place.leave()

    async def _sample(self, place: Place | None, sample: Sample, body: Mapping[str, Any]) -> list[Completion]:
        """place: None where it is sampled at once."""
        prompt, params = self._read(body)
        if place is None:
            completions = await sample(prompt, body["num_samples"], params)
        else:
            completions = await place.sample(sample, prompt, params)
        self.tokens.add(sum(len(completion.tokens) for completion in completions))
        scored = body.get("prompt_logprobs_last_n")
        return [_scored_at_the_end(c, scored) for c in completions] if scored else completions

    def _directory_of(self, sampler: str) -> str | None:
        row = self._database.get(samplers, sampler)
        return None if row is None else row.directory

    def _with(
        self,
        tenant: str,
        directory: str | None,
        max_deaths: int,
        newest: Callable[[], str | None] | None = None,
    ) -> Sample:
        """With the adapter in a directory, as rows name it. Raises UserError where it is gone.

        newest: of a sampler that follows its model: the directory that it has now.
        A tenant shares its cached prefixes with no other, who could tell from them what was asked.
        """
        self._adapter(directory)

        async def sample(prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
            nonlocal directory
            own = replace(params, cache_group=tenant)
            while True:
                try:
                    return await self._backend.sample(self._adapter(directory), prompt, n, own, max_deaths)
                except Exception:
                    if directory is None or (self._root / directory).is_dir():
                        raise
                    moved = newest() if newest is not None else None
                    if moved in (None, directory):
                        self._adapter(directory)  # which says that it was deleted
                    directory = moved

        return sample

    def _adapter(self, directory: str | None) -> Path | None:
        if directory is None:
            return None
        if not (self._root / directory).is_dir():
            raise UserError("these weights were deleted; create another sampling session")
        return self._root / directory

    def cancel(self, request: Row) -> None:
        """One that nobody waits for any more: it ends in the generator too."""
        task = self._running.get(request.id)
        if task is not None and task.cancel():
            self._queue.failed(request, "the request was cancelled", "user")

    async def _begin(self, request: Row) -> tuple[Mapping[str, Any], Row | None]:
        """The body of a request that runs from here on, and its sampler, unless that is gone."""
        self._queue.begin(request)
        return json.loads(self._queue.body(request)), self._database.get(samplers, request.target)

    async def _answer(self, request: Row, place: Place) -> None:
        try:
            await place.wait()
            written = await self._attempt(request, place)
            self._queue.done(request, written, wire.PROTOBUF)
        except UserError as error:
            self._queue.failed(request, str(error), "user", refused=True)
        except RunError as error:
            self._queue.failed(request, str(error), "server")
        except Exception as error:
            _log.exception("request %s failed", request.id)
            self._queue.failed(request, f"sampling failed: {error!r}", "server")

    async def _attempt(self, request: Row, place: Place) -> bytes:
        """The result. A request with which a generator or the server died twice is tried alone, once."""
        if request.deaths > _DEATHS:
            raise RunError(
                f"the server died {request.deaths} times while this request ran, so it is not tried again"
            )
        if request.deaths < _DEATHS:
            try:
                return await self._result(request, place)
            except GeneratorsDied as death:
                _log.warning("request %s is tried alone: %s", request.id, death)
        place.leave_turns()
        async with self._alone:
            self._blame.check(request.tenant)
            try:
                return await self._result(request, None)
            except GeneratorsDied as death:
                self._blame.add(request.tenant, _DEATHS + 1)
                raise RunError(
                    f"generators died {_DEATHS + 1} times while this request ran, so it is not tried again: "
                    f"{death}"
                ) from death

    async def _result(self, request: Row, place: Place | None) -> bytes:
        body, sampler = await self._database.patiently(partial(self._begin, request))
        if sampler is None:
            raise UserError("its sampling session is over; create another")
        newest = partial(self._directory_of, request.target) if sampler.inflight_of else None
        sample = self._with(request.tenant, sampler.directory, 1 if place is None else _DEATHS, newest)
        scores = self._scores(body, *self._read(body))
        completions, scored = await results_of([self._sample(place, sample, body), scores.compute(sample)])
        top, of_prompt = body.get("topk_sample_logprobs") or 0, body.get("topk_prompt_logprobs") or 0
        return wire.write_samples(completions, top, of_prompt, scored)

    def _read(self, body: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
        asked = body["sampling_params"]
        prompt: list[int] = []
        for chunk in body["prompt"]["chunks"]:
            if chunk.get("type") != "encoded_text":
                raise UserError(f"a chunk of type {chunk.get('type')!r}; only encoded_text is offered here")
            prompt += chunk["tokens"]
        context, most = self._backend.context_length, asked.get("max_tokens")
        room = context - len(prompt)
        if not prompt or room < 1:
            raise ContextExceeded(
                f"a prompt of {len(prompt)} tokens; it has to have 1 to {context - 1}, within the model's "
                f"context window of {context}"
            )
        if most is not None and most > room:
            raise ContextExceeded(
                f"Prompt length plus max_tokens exceeds the model's context window: {len(prompt)} prompt "
                f"tokens + {most} max_tokens > {context}"
            )
        if min(prompt) < 0 or max(prompt) >= self._backend.vocab_size:
            raise UserError(f"the prompt has a token outside the vocabulary of {self._backend.vocab_size}")
        if not 1 <= body["num_samples"] <= self._max_samples:
            raise UserError(f"num_samples={body['num_samples']}; it has to be 1 to {self._max_samples}")
        check_sampling(asked, self._backend.vocab_size)
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
            max_new_tokens=most or room,
            temperature=asked["temperature"],
            seed=secrets.randbits(31) if seed is None else seed % 2**31,
            stop_token_ids=token_ids,
            top_k=asked["top_k"],
            top_p=asked["top_p"],
            stop_texts=texts,
            json_schema=body.get("json_schema", ""),
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
