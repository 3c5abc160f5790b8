"""Blame: who keeps ending the engines, which all tenants share."""

import time
from collections import deque
from collections.abc import Callable

from rl.tinker.backend import UserError

_WINDOW_SECONDS = 3600.0


class Blame:
    """Deaths of engines while they worked for a tenant. After so many within an hour it has to wait."""

    def __init__(self, max_deaths: int, clock: Callable[[], float] = time.monotonic):
        self._max_deaths = max_deaths
        self._clock = clock
        self._deaths: dict[str, deque[float]] = {}

    def add(self, tenant: str, num_deaths: int = 1) -> None:
        self._deaths.setdefault(tenant, deque()).extend([self._clock()] * num_deaths)

    def check(self, tenant: str) -> None:
        """Raises UserError, which says until when."""
        deaths = self._deaths.get(tenant)
        if deaths is None:
            return
        while deaths and deaths[0] <= self._clock() - _WINDOW_SECONDS:
            deaths.popleft()
        if not deaths:
            del self._deaths[tenant]
        elif len(deaths) >= self._max_deaths:
            seconds = deaths[-self._max_deaths] + _WINDOW_SECONDS - self._clock()
            raise UserError(
                f"your requests ended an engine of this server {len(deaths)} times within an hour, and "
                f"limits.max_deaths is {self._max_deaths}: the next is taken in {seconds / 60:.0f} minutes; "
                f"send smaller requests then"
            )
