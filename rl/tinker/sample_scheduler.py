"""SampleScheduler: runs requests for samples when their turn has come."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rl.tinker.limits import Limits
from rl.tinker.requests import TooMany
from rl.tinker.sampling_queue import Load, Part, SamplingQueue
from rl.types import Completion, SamplingParams

_LOOK_SECONDS = 1.0  # a turn may come because time has passed
Sample = Callable[[Sequence[int], int, SamplingParams], Awaitable[list[Completion]]]


class Place:
    """A request's place in the queue, until `leave`."""

    def __init__(self, scheduler: "SampleScheduler", tenant: str, load: Load):
        self.tenant = tenant
        self.load = load
        self._scheduler = scheduler
        self._turns: asyncio.Queue[Part] = asyncio.Queue()
        self._first: Part | None = None

    async def wait(self) -> None:
        """Until its first turn."""
        self._first = await self._turns.get()

    async def sample(self, sample: Sample, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        """In parts, as their turns come. Sample i is drawn with seed `params.seed + i`, as in one call."""
        tasks: list[asyncio.Task[list[Completion]]] = []
        num_begun = 0
        try:
            async with asyncio.TaskGroup() as group:
                while num_begun < self.load.num_samples:
                    part = self._first or await self._turns.get()
                    self._first = None
                    tasks.append(group.create_task(self._run(part, sample, prompt, params)))
                    num_begun += part.count
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [completion for task in tasks for completion in task.result()]

    async def _run(
        self, part: Part, sample: Sample, prompt: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        own = replace(params, seed=params.seed + part.first)
        if part.first:  # the prompt is the same, and the first sample has its scores
            own = replace(own, prompt_likeliest=None)
        completions = await sample(prompt, part.count, own)
        lengths = [len(completion.tokens) for completion in completions]
        self._scheduler.end(part, sum(lengths) / len(lengths))
        return completions

    def take(self, part: Part) -> None:
        self._turns.put_nowait(part)

    def leave_turns(self) -> None:
        """It goes on without turns; it counts as waiting until `leave`."""
        self._scheduler.remove(self)

    def leave(self) -> None:
        """It is done, failed or cancelled."""
        self._scheduler.forget(self)


class SampleScheduler:
    """All requests for samples, of every route: see SamplingQueue for whose turn it is."""

    def __init__(self, capacity: int, shared: int, limits: Limits):
        """capacity, shared: see SamplingQueue."""
        self._queue = SamplingQueue(capacity, shared)
        self._max_waiting = limits.max_waiting
        self._max_waiting_samples = limits.max_waiting_samples
        self._places: Counter[str] = Counter()
        self._samples: Counter[str] = Counter()

    def check(self, tenant: str, num_samples: int) -> None:
        """Raises TooMany where a tenant has as many waiting as it may."""
        samples = self._samples[tenant]
        if self._places[tenant] >= self._max_waiting or samples + num_samples > self._max_waiting_samples:
            raise TooMany(
                f"{self._places[tenant]} requests for {samples} samples are waiting already; a tenant may "
                f"have {self._max_waiting} for {self._max_waiting_samples} (limits.max_waiting, "
                f"limits.max_waiting_samples): wait for their results first"
            )

    def enter(self, tenant: str, load: Load) -> Place:
        place = Place(self, tenant, load)
        self._places[tenant] += 1
        self._samples[tenant] += load.num_samples
        self._queue.add(place, tenant, load)
        self._start()
        return place

    def end(self, part: Part, mean_length: float) -> None:
        """mean_length: tokens of its samples, on average."""
        self._queue.end(part, mean_length)
        self._start()

    def remove(self, place: Place) -> None:
        self._queue.remove(place)
        self._start()

    def forget(self, place: Place) -> None:
        self._places[place.tenant] -= 1
        self._samples[place.tenant] -= place.load.num_samples
        self.remove(place)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._start()

    def _start(self) -> None:
        for part in self._queue.start():
            assert isinstance(part.key, Place)
            part.key.take(part)
