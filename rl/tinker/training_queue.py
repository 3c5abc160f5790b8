"""TrainingQueue: whose request the training engine takes next."""

from collections import OrderedDict, deque

from sqlalchemy.engine import Row

from rl.tinker.shares import Shares


class TrainingQueue:
    """Each tenant with work gets as much of the engine's time as any other. Its models take turns.

    A model's requests come in their order.
    """

    def __init__(self) -> None:
        self._shares = Shares()
        # By tenant, then by model: the model whose turn is next first. Nobody without a request is in it.
        self._waiting: dict[str, OrderedDict[str, deque[Row]]] = {}

    def add(self, request: Row) -> None:
        if request.tenant not in self._waiting:
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

    def charge(self, tenant: str, seconds: float) -> None:
        """The engine worked for it."""
        self._shares.charge(tenant, seconds)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def lengths(self, tenant: str) -> dict[str, int]:
        """Requests of each of its models with some."""
        return {model: len(requests) for model, requests in self._waiting.get(tenant, {}).items()}
