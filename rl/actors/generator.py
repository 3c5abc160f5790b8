"""Generators: a vLLM engine's rank as an actor, a replica's processes as one, and the pool as a Sampler."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from itertools import count
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank

from rl.actors.remote import Caller, Deadline, ProcessDied, only
from rl.actors.replica import Pool, Replica, State
from rl.interfaces import Sampler, Transport
from rl.models.generator.commands import Progress
from rl.models.generator.vllm_config import VLLMConfig
from rl.models.generator.wave import Wave
from rl.observability.timeline import Timeline
from rl.processes import kill_processes, process_info
from rl.types import Completion, PolicyVersion, ProcessInfo, SamplingParams
from rl.waiting import Deadlines
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore

_PREFIX_TOKENS = 32
_NUM_HOMES = 4096


class Generator(Actor):
    """One rank. Endpoints are concurrent: requests join while others run, and weights arrive in between.

    The first rank takes requests and decides what is run; the others follow it.
    """

    def __init__(self, config: VLLMConfig, transport: Transport):
        # vLLM changes the process that imports it: not the controller's.
        from rl.models.generator.engine import GeneratorEngine
        from rl.models.generator.lockstep import Lockstep
        from rl.models.generator.vllm_engine import VLLM

        self._lockstep = Lockstep(VLLM(config, transport), config.tensor_parallel)
        self._engine = GeneratorEngine(self._lockstep.tick)

    @concurrent_endpoint
    async def ready(self) -> ProcessInfo:
        """Called once: the ranks that follow begin to."""
        if current_rank().rank > 0:
            # Transports may call actors, for which they need the context of this one.
            follow = partial(copy_context().run, self._lockstep.follow)
            threading.Thread(target=follow, daemon=True).start()
        return process_info()

    @concurrent_endpoint
    async def progress(self) -> Progress:
        return self._engine.progress

    @concurrent_endpoint
    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, wave: Wave | None
    ) -> list[Completion]:
        return await self._engine.sample(prompt, n, params, wave)

    @concurrent_endpoint
    async def load_weights(self, manifest: Manifest) -> None:
        await self._engine.load_weights(manifest)


class GeneratorProcesses:
    """The running ranks of one generator. See replica.Member."""

    def __init__(self, name: str, mesh: Any, actors: Any, deadlines: Deadlines, timeline: Timeline):
        self._mesh = mesh
        self._all = actors
        self._first = actors.slice(procs=0)
        self._deadlines = deadlines
        self._timeline = timeline
        self._caller = Caller(name, f"logs/{name}*.log of the run")
        self._loading = False
        self._progress = Progress(0, 0)
        self._progressed = time.monotonic()

    async def ready(self) -> None:
        answers = await self._caller.call(
            self._all.ready.call(), "start", Deadline("start", self._deadlines.start), past=ProcessDied
        )
        self._caller.processes = tuple(answers.values())

    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, wave: Wave
    ) -> list[Completion]:
        """However long it takes, while `check` sees progress."""
        with self._timeline.span(self._caller.name, "sample"):
            call = only(self._first.sample.call(prompt, n, params, wave))
            return await self._caller.call(call, "sample", Deadline("progress", None))

    async def load_weights(self, manifest: Manifest) -> None:
        deadline = Deadline("load", self._deadlines.load)
        self._loading = True
        try:
            with self._timeline.span(self._caller.name, "load_weights"):
                call = only(self._first.load_weights.call(manifest))
                await self._caller.call(call, "load_weights", deadline, past=ProcessDied)
        finally:
            self._loading = False
            self._progressed = time.monotonic()

    async def check(self) -> None:
        """Raises ProcessDied: a rank is gone or does not answer, or requests wait and nothing is decoded."""
        deadline = Deadline("progress", self._deadlines.progress)
        answers = await self._caller.call(self._all.progress.call(), "progress", deadline, past=ProcessDied)
        progress, now = next(iter(answers.values())), time.monotonic()
        if progress.num_ticks != self._progress.num_ticks or not progress.num_requests or self._loading:
            self._progressed = now
        self._progress = progress
        if (silent := now - self._progressed) > deadline.seconds:
            raise ProcessDied(
                f"{self._caller.name} has {progress.num_requests} requests and decoded nothing for "
                f"{silent:.0f} s; see logs/{self._caller.name}*.log of the run, or {deadline.remedy}"
            )

    async def kill(self) -> None:
        await kill_processes(self._mesh, self._caller.processes)


class GeneratorReplica(Replica[GeneratorProcesses]):
    """A generator that can be spawned again, and that follows the WeightStore.

    Invariant: it serves only once it has the weights of some version, with `version` their number. Where
    updates are not in flight, it finishes what it has before it takes new weights.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[GeneratorProcesses]],
        max_restarts: int,
        in_flight_updates: bool,
        wanted: Callable[[], Manifest | None],
        store: WeightStore,
    ):
        """wanted: the version of the policy that it should have, once there is one."""
        super().__init__(name, spawn, max_restarts, store.changed)
        self.version: PolicyVersion | None = None
        self._in_flight_updates = in_flight_updates
        self._wanted = wanted
        self._store = store
        self._wave_numbers = count()
        self._wave: list[asyncio.Future] = []  # requests of the present turn of the event loop

    async def serve(self, member: GeneratorProcesses) -> None:
        self.version = None
        self._enter(State.LOADING)
        while True:
            await self._changed.wait_for(self._is_behind)
            if self.state == State.SERVING and not self._in_flight_updates:
                self._enter(State.DRAINING)
                await self._changed.wait_for(lambda: self.load == 0)
            manifest = self._wanted()
            if self.version is None and manifest.adapter is not None:
                await self._load(member, self._store.newest(MODEL))
            await self._load(member, manifest)
            self.version = manifest.version
            self._enter(State.SERVING)

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        """Requests made in one turn of the event loop are admitted together, in this order: see Wave."""
        return await self.ask(lambda member: self._in_wave(member, prompt, n, params), load=n)

    async def _in_wave(
        self, member: GeneratorProcesses, prompt: Sequence[int], n: int, params: SamplingParams
    ) -> list[Completion]:
        loop = asyncio.get_running_loop()
        position = len(self._wave)
        if not position:
            loop.call_soon(self._close_wave, next(self._wave_numbers))
        closed = loop.create_future()
        self._wave.append(closed)
        number, size = await closed
        return await member.sample(prompt, n, params, Wave(number, position, size))

    def _close_wave(self, number: int) -> None:
        wave, self._wave = self._wave, []
        for closed in wave:
            if not closed.done():
                closed.set_result((number, len(wave)))

    def _is_behind(self) -> bool:
        wanted = self._wanted()
        return wanted is not None and wanted.version != self.version

    async def _load(self, member: GeneratorProcesses, manifest: Manifest) -> None:
        async with self._store.reading(manifest):
            await member.load_weights(manifest)


class GeneratorPool(Pool[GeneratorReplica]):
    """The generators as one Sampler: by load, and where a prompt's prefix was computed before."""

    def __init__(
        self,
        name: str,
        make_replica: Callable[[int, Callable[[], Manifest | None]], GeneratorReplica],
        num_replicas: int,
        policy: str,
        store: WeightStore,
    ):
        """make_replica(number, wanted); policy: the name under which what is sampled is published."""
        self._store = store
        self._policy = policy
        self._pinned: Manifest | None = None
        self._homes: OrderedDict[tuple[int, ...], GeneratorReplica] = OrderedDict()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        super().__init__(name, [make_replica(i, self._wanted) for i in range(num_replicas)], store.changed)

    @property
    def served(self) -> PolicyVersion | None:
        """The newest version that a generator serves."""
        return max((r.version for r in self.replicas if r.state == State.SERVING), default=None)

    async def wait_served(self, version: PolicyVersion) -> None:
        """Until a generator serves this version, or a newer one."""
        await self._changed.wait_for(
            lambda: self.num_alive == 0 or (self.served is not None and self.served >= version)
        )
        if self.num_alive == 0:
            raise ProcessDied("every generator has died for good; see their logs under the run's logs/")

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        """With whatever version is served."""
        return await self._sample(lambda replica: True, prompt, n, params)

    def at_least(self, version: PolicyVersion) -> Sampler:
        """A sampler that starts no completion with older weights."""
        return _Routed(self, lambda replica: replica.version >= version)

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[tuple[PolicyVersion, Sampler]]:
        """Within the context no generator goes beyond the newest version: all samples are of that one."""
        manifest = self._store.newest(self._policy)
        async with self._store.reading(manifest):
            self._pinned = manifest
            try:
                yield manifest.version, _Routed(self, lambda replica: replica.version == manifest.version)
            finally:
                self._pinned = None
                self._changed.notify()

    def take_counts(self) -> tuple[int, int]:
        """Prompt tokens of all that was sampled since the last call, and how many of them the cache held."""
        counts = self._num_prompt_tokens, self._num_cached_tokens
        self._num_prompt_tokens = self._num_cached_tokens = 0
        return counts

    def _wanted(self) -> Manifest | None:
        return self._pinned or self._store.newest(self._policy)

    async def _sample(
        self,
        takes: Callable[[GeneratorReplica], bool],
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
    ) -> list[Completion]:
        prefix = tuple(prompt[:_PREFIX_TOKENS])

        async def on(replica: GeneratorReplica) -> list[Completion]:
            self._homes[prefix] = replica
            self._homes.move_to_end(prefix)
            if len(self._homes) > _NUM_HOMES:
                self._homes.popitem(last=False)
            return await replica.sample(prompt, n, params)

        completions = await self.ask(on, takes, prefer=self._homes.get(prefix))
        self._num_prompt_tokens += n * len(prompt)
        self._num_cached_tokens += sum(completion.num_cached_tokens for completion in completions)
        return completions


class _Routed:
    """A Sampler that only some replicas take part in."""

    def __init__(self, pool: GeneratorPool, takes: Callable[[GeneratorReplica], bool]):
        self._pool = pool
        self._takes = takes

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        return await self._pool._sample(self._takes, prompt, n, params)
