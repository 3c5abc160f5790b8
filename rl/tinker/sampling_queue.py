"""SamplingQueue: which requests for samples the generators work on, so that no tenant slows another down.

Generators batch whatever they have, and a batch is as slow as it is large. A tenant alone may fill them.
Beside others it has at most `shared` sequences more than the one that asks for the fewest. Where a step with
`shared` sequences takes twice as long as an empty one, each then keeps half of what it has alone: the tenant
with one sequence at a time, since a step takes at most twice as long; the one with many, since `shared` of
them are half as fast as an endless batch. A part that is heavier than that (a long prompt for a short answer)
runs alone of its tenant's, and only while its tenant has not had more of the generators' time.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from rl.tinker.shares import Shares

_REMEMBERED_SECONDS = 60.0  # a tenant counts as present for so long after its last request
_LEAD_SECONDS = 2.0
_FIRST_LENGTH = 16.0  # tokens, of a tenant whose completions are not known yet
_LENGTH_WEIGHT = 0.1  # of the newest completion's length, in a tenant's average


@dataclass(frozen=True, slots=True)
class Load:
    """What a request asks of the generators."""

    num_samples: int
    num_prompt_tokens: int
    max_new_tokens: int  # of each sample


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of a request that run together: `count` of them, from the one with the number `first` on."""

    key: Hashable
    first: int
    count: int


@dataclass(slots=True)
class _Waiting:
    load: Load
    num_started: int = 0

    def next_size(self, largest: int) -> int:
        return min(largest, self.load.num_samples - self.num_started)


@dataclass(frozen=True, slots=True)
class _Running:
    tenant: str
    num_samples: int
    weight: float


class SamplingQueue:
    """Requests wait here for their turns. Each runs in parts of at most `shared` samples.

    The owner runs what `start` returns and calls `end` for each part; or `remove` for the whole request.
    Weights are in sequences: the tokens that a part adds to an average decoding step.
    """

    def __init__(self, capacity: int, shared: int, clock: Callable[[], float] = time.monotonic):
        """capacity: samples in the generators at a time. shared: of a tenant's beside others', at least."""
        self._capacity = capacity
        self._shared = shared
        self._clock = clock
        self._shares = Shares()
        self._waiting: dict[str, OrderedDict[Hashable, _Waiting]] = {}
        self._running: dict[Hashable, dict[int, _Running]] = {}  # by request, then by the part's first sample
        self._weights: dict[str, float] = {}  # of a tenant's running parts
        self._samples: Counter[str] = Counter()  # of a tenant's running parts
        self._present: dict[str, float] = {}  # when each tenant last had work
        self._lengths: dict[str, float] = {}  # tokens of a tenant's completions, on average
        self._charged_at = clock()

    def add(self, key: Hashable, tenant: str, load: Load) -> None:
        self._charge()
        if tenant not in self._all_present():
            self._shares.arrive(tenant)
        self._waiting.setdefault(tenant, OrderedDict())[key] = _Waiting(load)
        self._present[tenant] = self._clock()

    def start(self) -> list[Part]:
        """Those whose turn has come, in order. They run from here on."""
        self._charge()
        started: list[Part] = []
        while tenants := [tenant for tenant in self._waiting if self._is_due(tenant)]:
            tenant = self._shares.next(tenants)
            key, waiting = next(iter(self._waiting[tenant].items()))
            size = waiting.next_size(self._shared)
            part = Part(key, waiting.num_started, size)
            waiting.num_started += size
            if waiting.num_started == waiting.load.num_samples:
                self._drop(tenant, key)
            weight = self._weight(tenant, waiting.load, size)
            self._running.setdefault(key, {})[part.first] = _Running(tenant, size, weight)
            self._weights[tenant] = self._weights.get(tenant, 0.0) + weight
            self._samples[tenant] += size
            started.append(part)
        return started

    def end(self, part: Part, mean_length: float | None = None) -> None:
        """It is done or failed; nothing where its request was removed. mean_length: tokens of its samples."""
        self._charge()
        own = self._running.get(part.key, {})
        if part.first not in own:
            return
        tenant = own[part.first].tenant
        self._stop(own.pop(part.first))
        if not own:
            del self._running[part.key]
        if mean_length is not None:
            before = self._lengths.get(tenant, mean_length)
            self._lengths[tenant] = before + _LENGTH_WEIGHT * (mean_length - before)

    def remove(self, key: Hashable) -> None:
        """Nobody waits for it any more: what of it runs is ended, and the rest does not start."""
        self._charge()
        for running in self._running.pop(key, {}).values():
            self._stop(running)
        for tenant in [tenant for tenant, waiting in self._waiting.items() if key in waiting]:
            self._drop(tenant, key)

    def _stop(self, running: _Running) -> None:
        tenant = running.tenant
        self._present[tenant] = self._clock()
        self._weights[tenant] -= running.weight
        self._samples[tenant] -= running.num_samples
        if not self._samples[tenant]:
            del self._weights[tenant], self._samples[tenant]

    def _drop(self, tenant: str, key: Hashable) -> None:
        del self._waiting[tenant][key]
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    @property
    def num_running(self) -> int:
        """Samples."""
        return self._samples.total()

    def _is_due(self, tenant: str) -> bool:
        if not self._running:
            return True
        waiting = next(iter(self._waiting[tenant].values()))
        size = waiting.next_size(self._shared)
        other_tenants = self._all_present() - {tenant}
        if not other_tenants:
            return self.num_running + size <= self._capacity
        if self._samples[tenant] + size > self._capacity / (1 + len(other_tenants)):
            return not self._samples[tenant]
        own, weight = self._weights.get(tenant, 0.0), self._weight(tenant, waiting.load, size)
        if own + weight <= self._shared + min(map(self._wanted, other_tenants)):
            return True
        return not own and self._shares.lead(tenant, other_tenants) <= _LEAD_SECONDS

    def _wanted(self, tenant: str) -> float:
        """The weight of its requests; above the capacity, of some of them."""
        weight = self._weights.get(tenant, 0.0)
        for waiting in self._waiting.get(tenant, {}).values():
            if weight > self._capacity:
                break
            weight += self._weight(tenant, waiting.load, waiting.load.num_samples - waiting.num_started)
        return weight

    def _weight(self, tenant: str, load: Load, size: int) -> float:
        length = min(load.max_new_tokens, max(1.0, self._lengths.get(tenant, _FIRST_LENGTH)))
        return size + load.num_prompt_tokens / length

    def _all_present(self) -> set[str]:
        since = self._clock() - _REMEMBERED_SECONDS
        self._present = {tenant: moment for tenant, moment in self._present.items() if moment > since}
        present = {*self._waiting, *self._weights, *self._present}
        self._shares.forget(present)
        return present

    def _charge(self) -> None:
        """The time since the last call, to the tenants whose requests ran, by their weights."""
        now, total = self._clock(), sum(self._weights.values())
        for tenant, weight in self._weights.items():
            self._shares.charge(tenant, (now - self._charged_at) * weight / total)
        self._charged_at = now
