"""What several use at the same time, each a part of it: a link, or a generator's decoding steps."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

from benchmarks.simulation.clock import SimulatedLoop, spared


class Shared:
    """Jobs that all go on at the same rate, which depends on how many there are.

    A job that began when each had got `v` units ends when each has got `v` and its own amount: so whoever comes or
    goes costs a logarithm of their number. Each is a future, which whoever made it may complete, or cancel, before
    its time, and then gives up.
    """

    def __init__(self, loop: SimulatedLoop, rate: Callable[[int], float], limit: int | None = None):
        """rate: number of jobs -> units a second that each of them gets. limit: of jobs at a time; others wait, the
        oldest first."""
        self.loop, self._rate, self._limit = loop, rate, limit
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []  # also of jobs that were given up
        self._live: set[asyncio.Future[None]] = set()
        self._waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._numbers = count()
        self._each = 0.0  # what each has got
        self._at = self._blocked_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.busy = 0.0  # seconds in which there was a job
        self.done = 0.0  # units

    async def use(self, amount: float) -> None:
        """Returns once the amount is done."""
        future = self.begin(amount)
        try:
            await future
        finally:
            self.give_up(future)

    @spared
    def begin(self, amount: float) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self.loop.create_future()
        self._advance()
        self._waiting.append((amount, future))
        self._admit()
        self._set_timer()
        return future

    @spared
    def give_up(self, future: asyncio.Future[None]) -> None:
        """Nothing happens to one that has ended."""
        if future in self._live:
            self._advance()
            self._live.remove(future)
            self._admit()
            self._set_timer()

    @spared
    def pause(self, seconds: float) -> None:
        """Nothing goes on for so long, from now on or from the end of an earlier pause."""
        self._advance()
        self._blocked_until = max(self._blocked_until, self.loop.time()) + seconds
        self._set_timer()

    def _admit(self) -> None:
        while self._waiting and (self._limit is None or len(self._live) < self._limit):
            amount, future = self._waiting.popleft()
            if not future.done():
                heapq.heappush(self._ends, (self._each + amount, next(self._numbers), future))
                self._live.add(future)
                self.done += amount

    def _advance(self) -> None:
        now = self.loop.time()
        seconds = max(0.0, now - max(self._at, self._blocked_until))
        if self._live:
            self.busy += now - self._at
            self._each += seconds * self._rate(len(self._live))
        self._at = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2] not in self._live:
            heapq.heappop(self._ends)
        if self._ends:
            seconds = max(0.0, (self._ends[0][0] - self._each) / self._rate(len(self._live)))
            self._timer = self.loop.call_at(max(self._at, self._blocked_until) + seconds, self._end)

    @spared
    def _end(self) -> None:
        self._advance()
        # asyncio runs a timer as much as its clock's resolution early.
        reached = self._each + 4e-9 * self._rate(len(self._live) or 1) + 1e-12 * self._each
        while self._ends and (self._ends[0][2] not in self._live or self._ends[0][0] <= reached):
            future = heapq.heappop(self._ends)[2]
            self._live.discard(future)
            if not future.done():
                future.set_result(None)
        self._admit()
        self._set_timer()
