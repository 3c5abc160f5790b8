"""Fair shares by tenant: of the training engine's time, and of the generators'.

A share is time, not tokens: a tenant that gets half of an engine's time gets half of what it has alone,
whatever its requests look like. See `TrainingQueue` and `SamplingQueue`.
"""

from collections.abc import Iterable


class Shares:
    """How much of an engine's time each tenant has had. Who was away has saved nothing up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._turn = 0.0  # what the tenant had whose turn it was last

    def arrive(self, tenant: str) -> None:
        """It has work, after a time without."""
        self._seconds[tenant] = max(self._seconds.get(tenant, 0.0), self._turn)

    def charge(self, tenant: str, seconds: float) -> None:
        self._seconds[tenant] = self._seconds.get(tenant, 0.0) + seconds

    def next(self, tenants: Iterable[str]) -> str:
        """The one that has had the least; the first of several. Raises ValueError where there is none."""
        tenant = min(tenants, key=lambda tenant: self._seconds.get(tenant, 0.0))
        self._turn = max(self._turn, self._seconds.get(tenant, 0.0))
        return tenant

    def lead(self, tenant: str, tenants: Iterable[str]) -> float:
        """Seconds that it has had more than the one of the others that has had the least."""
        least = min((self._seconds.get(rival, 0.0) for rival in tenants if rival != tenant), default=None)
        return 0.0 if least is None else self._seconds.get(tenant, 0.0) - least

    def forget(self, tenants: Iterable[str]) -> None:
        """Forget all tenants but these. The others have no work, and had none lately."""
        kept = set(tenants)
        self._seconds = {tenant: seconds for tenant, seconds in self._seconds.items() if tenant in kept}
