"""Rate: a count, and how fast it has grown of late."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 60


class Rate:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.total = 0
        self._clock = clock
        self._began = clock()
        self._seconds: deque[tuple[int, int]] = (
            deque()
        )  # each second in which something was added -> how much

    def add(self, count: int) -> None:
        self.total += count
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            count += self._seconds.pop()[1]
        self._seconds.append((second, count))
        self._forget()

    def per_second(self) -> float:
        """Over the last minute, or since the beginning."""
        self._forget()
        lived = max(1.0, min(_WINDOW_SECONDS, self._clock() - self._began))
        return sum(count for _, count in self._seconds) / lived

    def _forget(self) -> None:
        while self._seconds and self._seconds[0][0] <= self._clock() - _WINDOW_SECONDS:
            self._seconds.popleft()
