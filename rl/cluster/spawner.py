"""Spawner: how each replica of a plan is started, and started again. It alone asks for processes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rl.actors.births import Births
from rl.actors.engine_actor import EngineActor
from rl.actors.generator import Generator, GeneratorProcesses
from rl.actors.remote import Caller, Deadline, ProcessDied
from rl.actors.reward import RewardProcess, RewardWorker
from rl.cluster.environment import engine_environment, kernel_cache
from rl.cluster.launchers import Launcher
from rl.cluster.spawn import GROUP_ENVIRONMENT, Procs, join_group, spawn_procs
from rl.envs.base import Env
from rl.envs.chat.env import ChatEnv
from rl.interfaces import Transport
from rl.models.generator.environment import generator_environment
from rl.observability.timeline import Timeline
from rl.plan.types import EngineSpec, GeneratorSpec, Process, Replica, WorkerSpec
from rl.waiting import Deadlines

P = TypeVar("P", GeneratorProcesses, RewardProcess)
T = TypeVar("T")
S = TypeVar("S", EngineSpec, GeneratorSpec, WorkerSpec)


class Spawner:
    """Whoever calls a function that it gives owns the processes."""

    def __init__(
        self,
        launcher: Launcher,
        models: Mapping[str, Path],
        logs: Path,
        shared: Path,
        deadlines: Deadlines,
        timeline: Timeline,
    ):
        """models: the directory of each model that a plan names. shared: owned, in shared memory."""
        self._launcher = launcher
        self._models = models
        self._logs = logs
        self._shared = shared
        self._deadlines = deadlines
        self._timeline = timeline
        self._births: dict[str, Births] = {}
        self._stores: dict[str, Any] = {}  # where the processes of a mesh meet, by its name

    def engine(
        self, replica: Replica, actor: type[EngineActor], *arguments: Any
    ) -> Callable[[], Awaitable[tuple[Any, Any]]]:
        """arguments: what such an actor takes beside the engine's own arguments."""
        name, spec = replica.name, spec_of(replica, EngineSpec)

        def environment(process: Process) -> dict[str, str]:
            return engine_environment(process.threads) | GROUP_ENVIRONMENT

        async def spawn() -> tuple[Any, Any]:
            mesh = await self._spawn_replica(replica, environment, self._end_log(replica))
            self._stores[name] = await self.started(name, join_group(mesh, self._launcher.address))
            directory = str(self._models[spec.model])
            return mesh, mesh.spawn(name, actor, spec.kind, directory, spec.config, *arguments)

        return spawn

    def generator(
        self, replica: Replica, transport: Transport
    ) -> Callable[[], Awaitable[GeneratorProcesses]]:
        name, spec = replica.name, spec_of(replica, GeneratorSpec)
        model_dir, shared = str(self._models[spec.model]), str(self._shared)
        config = replace(spec.config, model_dir=model_dir, shared_directory=shared)
        group = GROUP_ENVIRONMENT if config.tensor_parallel > 1 else {}

        def environment(process: Process) -> dict[str, str]:
            on_gpu = bool(process.gpus)
            return generator_environment(process.threads, config.compile, config.dtype, on_gpu) | group

        async def spawn() -> GeneratorProcesses:
            mesh = await self._spawn_replica(replica, environment)
            if config.tensor_parallel > 1:
                self._stores[name] = await self.started(name, join_group(mesh, self._launcher.address))
            actors = mesh.spawn("generator", Generator, config, transport)
            return await _ready(GeneratorProcesses(name, mesh, actors, self._deadlines, self._timeline))

        return lambda: self._or_nothing(replica, spawn())

    def reward(
        self, replica: Replica, task: Env, judge: Mapping[str, str]
    ) -> Callable[[], Awaitable[RewardProcess]]:
        """judge: the variables by which it finds the run's judge."""
        name, limit = replica.name, spec_of(replica, WorkerSpec).limit_seconds
        longest = limit
        if isinstance(task, ChatEnv):
            longest = max(limit, task.turn_seconds, task.episode_seconds)

        def environment(process: Process) -> dict[str, str]:
            return {**engine_environment(process.threads), **judge}

        async def spawn() -> RewardProcess:
            mesh = await self._spawn_replica(replica, environment)
            actor = mesh.spawn("reward", RewardWorker, task, limit).slice(procs=0)
            return await _ready(RewardProcess(name, mesh, actor, longest, self._deadlines, self._timeline))

        return lambda: self._or_nothing(replica, spawn())

    async def _or_nothing(self, replica: Replica, starting: Awaitable[T]) -> T:
        """What `starting` gives; where it fails, none of its processes is left on a device."""
        try:
            return await self.births_of(replica.name).watching(starting)
        except BaseException:
            await asyncio.shield(self._end_log(replica))
            raise

    async def _end_log(self, replica: Replica) -> None:
        with suppress(ProcessDied):  # a host that is lost has ended all
            hosts = [process.host for process in replica.processes]
            await self._launcher.end_log(self._logs / replica.name, hosts)

    async def storage(self, name: str) -> Procs:
        """One process without a device on the first host, which is no replica's."""
        return await self._spawn(name, (0,), [{**engine_environment(1), **self._shown(0, ())}])

    def births_of(self, name: str) -> Births:
        return self._births.setdefault(name, Births(name, self._timeline))

    async def started(self, name: str, answer: Awaitable[Any]) -> Any:
        return await Caller(name).call(answer, "start", Deadline("start", self._deadlines.start))

    async def _spawn_replica(
        self,
        replica: Replica,
        environment: Callable[[Process], Mapping[str, str]],
        before: Awaitable[None] | None = None,
    ) -> Procs:
        hosts = tuple(process.host for process in replica.processes)
        environments = [
            {**environment(process), **self._shown(process.host, gpus_shown(replica, process))}
            for process in replica.processes
        ]
        return await self._spawn(replica.name, hosts, environments, before)

    async def _spawn(
        self,
        name: str,
        hosts: tuple[int, ...],
        environments: Sequence[Mapping[str, str]],
        before: Awaitable[None] | None = None,
    ) -> Procs:
        # Before anything is awaited: who watches over the births would see the deaths of an earlier mesh.
        birth = self.births_of(name).expect(len(hosts))
        if before is not None:
            await before
        mesh = await self._launcher.attach(name, hosts)
        cache = {} if self._launcher.run else kernel_cache()  # an `rl worker` has its own
        environments = [{**environment, **birth, **cache} for environment in environments]
        return spawn_procs(mesh, name, environments, len(hosts) // len({*hosts}), self._logs / name)

    def _shown(self, host: int, gpus: Sequence[int]) -> dict[str, str]:
        """Which GPUs a process is shown, as its host calls them. Nothing on a host without GPUs."""
        of_host = self._launcher.host(host).gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(of_host[gpu].visible for gpu in gpus)} if of_host else {}


def gpus_shown(replica: Replica, process: Process) -> tuple[int, ...]:
    """Its own; to a rank of a generator those of the others on its host too, in the order of ranks: vLLM
    counts its GPUs by rank, and looks for a way from each to each (custom_all_reduce.py)."""
    if not isinstance(replica.spec, GeneratorSpec):
        return process.gpus
    of_host = (other.gpus for other in replica.processes if other.host == process.host)
    return tuple(dict.fromkeys(chain.from_iterable(of_host)))


def spec_of(replica: Replica, kind: type[S]) -> S:
    assert isinstance(replica.spec, kind)
    return replica.spec


async def _ready(member: P) -> P:
    """Once it answers. One that does not is not left behind."""
    try:
        await member.ready()
    except BaseException:
        await asyncio.shield(member.kill())
        raise
    return member
