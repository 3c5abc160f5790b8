"""TrainingQueue: whose request the training engine takes next."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable

from sqlalchemy.engine import Row

from rl.tinker.shares import Shares

_PATIENCE_SECONDS = 1.0
_LEAD_SECONDS = 1.0


class TrainingQueue:
    """Each tenant with work gets as much of the engine's time as any other. Its models take turns.

    A model's requests come in their order. A client that waits for each answer has no request here for a
    moment. The engine is kept idle for it then, rather than given to a tenant that has had more of its time;
    that counts as its time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[str, float] = {}  # tenants without a request -> when their last one ended
        self._shares = Shares()
        # By tenant, then by model: the model whose turn is next first. Nobody without a request is in it.
        self._waiting: dict[str, OrderedDict[str, deque[Row]]] = {}

    def add(self, request: Row) -> None:
        if request.tenant not in self._waiting and request.tenant not in self._just_ended():
            self._shares.arrive(request.tenant)
        models = self._waiting.setdefault(request.tenant, OrderedDict())
        models.setdefault(request.target, deque()).append(request)

    def take(self) -> Row:
        """Raises ValueError where there is none."""
        tenant = self._shares.next(self._waiting)
        models = self._waiting[tenant]
        model, requests = models.popitem(last=False)
        request = requests.popleft()
        if requests:
            models[model] = requests  # behind the tenant's others
        if not models:
            del self._waiting[tenant]
        return request

    def end(self, tenant: str, seconds: float) -> None:
        """The engine has worked for it."""
        self._shares.charge(tenant, seconds)
        self._ended[tenant] = self._clock()

    def idle_for(self) -> tuple[str, float] | None:
        """A tenant whose next request is waited for, and for how many seconds at most; None: take one."""
        least = self._shares.next(self._waiting)
        for tenant, moment in self._just_ended().items():
            if tenant not in self._waiting and self._shares.lead(least, [tenant]) > _LEAD_SECONDS:
                return tenant, moment + _PATIENCE_SECONDS - self._clock()
        return None

    def charge_idle(self, tenant: str, seconds: float) -> None:
        """The engine was kept idle for it."""
        self._shares.charge(tenant, seconds)

    def _just_ended(self) -> dict[str, float]:
        since = self._clock() - _PATIENCE_SECONDS
        self._ended = {tenant: moment for tenant, moment in self._ended.items() if moment > since}
        return self._ended

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def lengths(self, tenant: str) -> dict[str, int]:
        """Requests of each of its models with some."""
        return {model: len(requests) for model, requests in self._waiting.get(tenant, {}).items()}
