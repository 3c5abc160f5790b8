"""A vLLM engine's rank as an actor, and the ranks of one generator as one."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank

from rl.actors.remote import Caller, Deadline, ProcessDied, ProcessSilent, only
from rl.errors import GeneratorFailed
from rl.interfaces import Transport
from rl.models.generator.commands import Progress
from rl.models.generator.vllm_config import VLLMConfig
from rl.models.generator.wave import Wave
from rl.observability.timeline import Timeline
from rl.processes import ProcessInfo, importing, kill_processes, process_info
from rl.types import Completion, SamplingParams
from rl.waiting import Deadlines, beside, loop_seconds
from rl.weight_sync.manifest import Manifest


class Generator(Actor):
    """One rank. Endpoints are concurrent: requests join while others run, and weights arrive in between.

    The first rank takes requests and decides what is run; the others follow it.
    """

    def __init__(self, config: VLLMConfig, transport: Transport):
        # vLLM changes the process that imports it: not the controller's.
        with importing():
            from rl.models.generator.engine import GeneratorEngine
            from rl.models.generator.lockstep import Lockstep
            from rl.models.generator.vllm_engine import VLLM

        # All of vLLM in one thread: CUDA's streams, and OpenMP's threads, belong to the one that made them.
        self._thread = ThreadPoolExecutor(1, "vllm")
        self._transport = transport
        make = partial(copy_context().run, VLLM, config, transport)
        self._lockstep = Lockstep(self._thread.submit(make).result(), config.tensor_parallel)
        self._engine = GeneratorEngine(self._lockstep.tick, self._thread)

    @concurrent_endpoint
    async def ready(self) -> ProcessInfo:
        """Called once: the ranks that follow begin to."""
        if current_rank().rank > 0:
            # Transports may call actors, for which they need the context of this one.
            self._thread.submit(copy_context().run, self._lockstep.follow)
        return process_info()

    @concurrent_endpoint
    async def progress(self) -> Progress:
        return self._engine.progress

    @concurrent_endpoint
    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, wave: Wave | None, key: int | None
    ) -> list[Completion]:
        return await self._engine.sample(prompt, n, params, wave, key)

    @concurrent_endpoint
    async def give_up_samples(self, keys: Sequence[int] | None) -> None:
        self._engine.give_up_samples(keys)

    @concurrent_endpoint
    async def load_weights(self, manifest: Manifest) -> None:
        await asyncio.to_thread(self._transport.prefetch, manifest)  # it decodes meanwhile
        await self._engine.load_weights(manifest)

    @concurrent_endpoint
    async def suspend(self) -> None:
        await self._engine.suspend()


class GeneratorProcesses:
    """The running ranks of one generator. See member.GeneratorMember."""

    def __init__(self, name: str, mesh: Any, actors: Any, deadlines: Deadlines, timeline: Timeline):
        self._mesh = mesh
        self._all = actors
        self._first = actors.slice(procs=0)
        self._deadlines = deadlines
        self._timeline = timeline
        self._caller = Caller(name, f"logs/{name}*.log of the run")
        self._loading = False
        self._progress = Progress(0, 0)
        self._progressed = loop_seconds()  # where the loop is blocked, nobody can see progress

    async def ready(self) -> None:
        answers = await self._caller.call(
            self._all.ready.call(), "start", Deadline("start", self._deadlines.start), past=ProcessSilent
        )
        self._caller.processes = tuple(answers.values())

    async def sample(
        self,
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        wave: Wave | None = None,
        key: int | None = None,
    ) -> list[Completion]:
        """However long it takes, while `check` sees progress. key: what `give_up_samples` names it by."""
        with self._timeline.span(self._caller.name, "sample"):
            call = only(self._first.sample.call(prompt, n, params, wave, key))
            try:
                return await self._caller.call(call, "sample", Deadline("progress", None))
            except GeneratorFailed as error:  # as good as dead
                raise ProcessDied(f"{self._caller.name}: {error}") from error

    async def load_weights(self, manifest: Manifest) -> None:
        await self._change("load_weights", manifest)

    async def suspend(self) -> None:
        """Leave the device; nobody waits for a sample. The next model that is loaded brings it back."""
        await self._change("suspend")

    async def _change(self, method: str, *args: Any) -> None:
        deadline = Deadline("load", self._deadlines.load)
        self._loading = True
        try:
            with self._timeline.span(self._caller.name, method):
                call = only(getattr(self._first, method).call(*args))
                await self._caller.call(call, method, deadline, past=ProcessDied)
        except GeneratorFailed as error:
            raise ProcessDied(f"{self._caller.name}: {error}") from error
        finally:
            self._loading = False
            self._progressed = loop_seconds()

    async def give_up_samples(self, keys: Sequence[int] | None = None) -> None:
        """End what is being sampled for these requests, or all: nobody waits for it any more."""
        call = only(self._first.give_up_samples.call(keys))
        await self._caller.call(
            call, "give_up_samples", Deadline("progress", self._deadlines.progress), past=ProcessDied
        )

    async def check(self) -> None:
        """Raises ProcessDied: a rank is gone or does not answer, or requests wait and nothing is decoded."""
        limit = self._deadlines.progress
        deadline = Deadline("progress", limit)
        asked = self._all.progress.call()
        async with beside(self._caller.until_gone("progress")):
            answers = await self._caller.call(asked, "progress", deadline, past=ProcessDied)
        progress, now = next(iter(answers.values())), loop_seconds()
        if progress.num_ticks != self._progress.num_ticks or not progress.num_requests or self._loading:
            self._progressed = now
        self._progress = progress
        if (silent := now - self._progressed) > limit:
            raise ProcessDied(
                f"{self._caller.name} has {progress.num_requests} requests and decoded nothing for "
                f"{silent:.0f} s; see logs/{self._caller.name}*.log of the run, or {deadline.remedy}"
            )

    async def kill(self) -> None:
        await kill_processes(self._mesh, self._caller.processes)
