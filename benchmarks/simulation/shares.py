"""What several use at the same time, each a part of it: a link, or a generator's decoding steps."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from benchmarks.simulation.clock import SimulatedLoop, spared


class Shared:
    """Jobs that all go on at the same rate, which depends on how many there are.

    A job that began when each had got `v` units ends when each has got `v` and its own amount: so whoever comes or
    goes costs a logarithm of their number.
    """

    def __init__(self, loop: SimulatedLoop, rate: Callable[[int], float], limit: int | None = None):
        """rate: number of jobs -> units a second that each of them gets. limit: of jobs at a time; others wait, the
        oldest first."""
        self.loop, self._rate, self._limit = loop, rate, limit
        self._jobs: list[tuple[float, int, asyncio.Future[None]]] = []
        self._waiting: list[tuple[int, float, asyncio.Future[None]]] = []
        self._numbers = count()
        self._size = 0  # without those that were given up
        self._each = 0.0  # what each has got
        self._at = self._blocked_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.busy = 0.0  # seconds in which there was a job
        self.done = 0.0  # units

    async def use(self, amount: float) -> None:
        """Returns once the amount is done."""
        future = self._begin(amount)
        try:
            await future
        except asyncio.CancelledError:
            self._give_up(future)
            raise

    @spared
    def pause(self, seconds: float) -> None:
        """Nothing goes on for so long, from now on or from the end of an earlier pause."""
        self._advance()
        self._blocked_until = max(self._blocked_until, self.loop.time()) + seconds
        self._set_timer()

    @spared
    def _begin(self, amount: float) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self.loop.create_future()
        self._advance()
        self._waiting.append((next(self._numbers), amount, future))
        self._admit()
        self._set_timer()
        return future

    def _admit(self) -> None:
        at = 0
        while at < len(self._waiting) and (self._limit is None or self._size < self._limit):
            number, amount, future = self._waiting[at]
            at += 1
            if not future.done():
                heapq.heappush(self._jobs, (self._each + amount, number, future))
                self._size += 1
                self.done += amount
        del self._waiting[:at]

    @spared
    def _give_up(self, future: asyncio.Future[None]) -> None:
        """The future is cancelled; it leaves the heap when its turn comes."""
        self._advance()
        if any(job is future for _, _, job in self._jobs):
            self._size -= 1
            self._admit()
        self._set_timer()

    def _advance(self) -> None:
        now = self.loop.time()
        seconds = max(0.0, now - max(self._at, self._blocked_until))
        if self._size:
            self.busy += now - self._at
            self._each += seconds * self._rate(self._size)
        self._at = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        while self._jobs and self._jobs[0][2].done():
            heapq.heappop(self._jobs)
        if not self._jobs:
            self._timer = None
            return
        seconds = max(0.0, (self._jobs[0][0] - self._each) / self._rate(self._size))
        self._timer = self.loop.call_at(max(self._at, self._blocked_until) + seconds, self._end)

    @spared
    def _end(self) -> None:
        self._advance()
        # asyncio runs a timer as much as its clock's resolution early.
        reached = self._each + 4e-9 * self._rate(self._size or 1) + 1e-12 * self._each
        while self._jobs and (self._jobs[0][2].done() or self._jobs[0][0] <= reached):
            future = heapq.heappop(self._jobs)[2]
            if not future.done():
                future.set_result(None)
                self._size -= 1
        self._admit()
        self._set_timer()
