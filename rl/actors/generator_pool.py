"""GeneratorPool: the generators as one Sampler."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from rl.actors.generator_replica import GeneratorReplica, Updates
from rl.actors.replica import Pool, State
from rl.interfaces import Sampler
from rl.types import Completion, PolicyVersion, SamplingParams
from rl.waiting import Signal
from rl.weight_sync.store import WeightStore

_PREFIX_TOKENS = 32
_NUM_HOMES = 4096
_Homes = dict[GeneratorReplica, PolicyVersion | None]
"""Those whose caches have a prefix, each with the version of its weights, with which the cache is dropped."""


class GeneratorPool(Pool[GeneratorReplica]):
    """The generators as one Sampler: by load, and where a prompt's prefix was computed before."""

    def __init__(
        self,
        name: str,
        make_replica: Callable[[int, Updates, Signal], GeneratorReplica],
        num_replicas: int,
        policy: str,
        store: WeightStore,
    ):
        """make_replica(number, updates, changed) makes a replica that notifies `changed`.

        policy: the name under which what is sampled is published.
        """
        self._updates = Updates(store, policy)
        self._homes: OrderedDict[tuple[int, ...], _Homes] = OrderedDict()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        changed = Signal()
        replicas = [make_replica(i, self._updates, changed) for i in range(num_replicas)]
        super().__init__(name, replicas, changed)

    @property
    def served(self) -> PolicyVersion | None:
        """The newest version that a generator serves."""
        serving = (r.version for r in self.replicas if r.state == State.SERVING)
        return max((version for version in serving if version is not None), default=None)

    async def wait_served(self, version: PolicyVersion) -> None:
        """Until a generator serves this version, or a newer one."""
        await self.changed.wait_for(
            lambda: self.num_alive == 0 or (self.served is not None and self.served >= version)
        )
        self.check_alive()

    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, max_deaths: int | None = None
    ) -> list[Completion]:
        """With whatever version is served. Raises ProcessDied where so many generators died on the way."""
        return await self._sample(lambda replica: True, prompt, n, params, max_deaths)

    def at_least(self, version: PolicyVersion) -> Sampler:
        """A sampler that starts no completion with older weights."""
        return _Routed(self, lambda replica: replica.version is not None and replica.version >= version)

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[tuple[PolicyVersion, Sampler]]:
        """Within the context no generator goes beyond the newest version: all samples are of that one.

        Their prompts are none of a step's.
        """
        updates, manifest = self._updates, self._updates.newest
        assert manifest is not None  # something is published before anything is evaluated
        async with updates.store.reading(manifest):
            updates.pinned = manifest
            try:
                pinned = _Routed(self, lambda replica: replica.version == manifest.version, counts=False)
                yield manifest.version, pinned
            finally:
                updates.pinned = None
                updates.store.changed.notify()

    async def forget(self) -> None:
        """Nothing is served until the policy is published again, and what is being sampled is given up."""
        self._updates.epoch += 1
        for replica in self.replicas:
            replica.forget()
        self.take_counts()
        await self._updates.store.forget(self._updates.policy)

    def take_counts(self) -> tuple[int, int]:
        """Prompt tokens of what was sampled for training since the last call, and how many of them the cache
        held."""
        counts = self._num_prompt_tokens, self._num_cached_tokens
        self._num_prompt_tokens = self._num_cached_tokens = 0
        return counts

    def take_metrics(self) -> dict[str, float]:
        """Of a step: who serves, and what prompts cost since the last call."""
        metrics: dict[str, float] = {"generators/serving": self.num_serving}
        metrics["generators/alive"] = self.num_alive
        prompt_tokens, cached = self.take_counts()
        if prompt_tokens:
            metrics |= {"tokens/prompt": prompt_tokens, "tokens/prompt_computed": prompt_tokens - cached}
        return metrics

    async def _sample(
        self,
        takes: Callable[[GeneratorReplica], bool],
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        max_deaths: int | None = None,
        counts: bool = True,
    ) -> list[Completion]:
        """counts: in `take_counts`."""
        prefix = tuple(prompt[:_PREFIX_TOKENS])
        homes = [r for r, version in self._homes.get(prefix, {}).items() if r.version == version]
        serving = [r for r in homes if r.state is State.SERVING and takes(r)]
        home = min(serving, key=lambda replica: replica.load, default=None)

        async def on(replica: GeneratorReplica) -> list[Completion]:
            self._homes.setdefault(prefix, {})[replica] = replica.version
            self._homes.move_to_end(prefix)
            if len(self._homes) > _NUM_HOMES:
                self._homes.popitem(last=False)
            return await replica.sample(prompt, n, params)

        completions = await self.ask(on, takes, prefer=home, max_deaths=max_deaths)
        if counts:
            self._num_prompt_tokens += n * len(prompt)
            self._num_cached_tokens += sum(completion.num_cached_tokens for completion in completions)
        return completions


class _Routed:
    """A Sampler that only some replicas take part in."""

    def __init__(self, pool: GeneratorPool, takes: Callable[[GeneratorReplica], bool], counts: bool = True):
        self._pool = pool
        self._takes = takes
        self._counts = counts

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        return await self._pool._sample(self._takes, prompt, n, params, counts=self._counts)
