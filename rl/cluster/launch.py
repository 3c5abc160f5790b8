"""Launch: start every process of a run and wait until each is ready; on the way out, end them all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rl.actors.actors import Actors, Revival
from rl.actors.births import Births
from rl.actors.engine import EngineHandle
from rl.actors.engine_actor import EngineActor
from rl.actors.generator import Generator, GeneratorProcesses
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica, Updates
from rl.actors.judge import JudgeReplica, JudgeServer
from rl.actors.reference import Reference, ReferenceAdapter, ReferenceMesh
from rl.actors.remote import Caller, Deadline, EngineDied, ProcessDied
from rl.actors.replica import Pool, Replica
from rl.actors.reward import RewardPool, RewardProcess, RewardWorker
from rl.actors.trainer import PolicyTrainer, TrainerHandle
from rl.cluster.actor_specs import ActorSpecs, EngineSpec
from rl.cluster.environment import engine_environment
from rl.cluster.machine import num_cores
from rl.cluster.placement import Place, place
from rl.cluster.spawn import (
    GROUP_ENVIRONMENT,
    join_group,
    kill_children,
    kill_those_that_log_to,
    spawn_procs,
    visible_devices,
)
from rl.envs.chat.env import ChatEnv
from rl.interfaces import Transport
from rl.models.generator.environment import generator_environment
from rl.models.generator.vllm_config import VLLMConfig
from rl.models.tokenizer import HFTokenizer
from rl.observability.timeline import Timeline
from rl.owned_directory import SHARED_MEMORY, owned_directory, temporary_files
from rl.processes import adopt_orphans, allow_many_files, freeze_heap, reap_orphans
from rl.types import POLICY, REFERENCE
from rl.waiting import Signal, beside, together
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.shared_memory import SharedMemory
from rl.weight_sync.store import WeightStore

_STOP_SECONDS = 4.0
P = TypeVar("P", GeneratorProcesses, RewardProcess)


@asynccontextmanager
async def launch(specs: ActorSpecs, run_dir: Path, timeline: Timeline | None = None) -> AsyncIterator[Actors]:
    """The running actors. Whatever happens within, no process and no shared memory is left behind."""
    import monarch.actor

    failures = run_dir / "logs" / "failures.log"
    failures.parent.mkdir(parents=True, exist_ok=True)
    is_over = False  # from then on processes are ended by us

    def note(failure: Any) -> None:
        if not is_over:
            _append(failures, f"{failure}\n")

    # By default Monarch ends the controller when any process dies; here calls to that process fail instead.
    monarch.actor.unhandled_fault_hook = note

    adopt_orphans()
    allow_many_files()
    with temporary_files(), owned_directory(SHARED_MEMORY, str(run_dir)) as shared:
        others = {child.pid for child in psutil.Process().children(recursive=True)}
        launcher = _Launcher(specs, run_dir, shared, timeline or Timeline())
        try:
            actors = await launcher.start()
            judge = [launcher.judge.run()] if launcher.judge else []
            watches = [watch() for watch in launcher.watches]
            pools = actors.generators.run(), actors.rewards.run()
            async with beside(reap_orphans(), *pools, *judge, *watches):
                await launcher.ready(actors)
                try:
                    yield actors
                finally:
                    is_over = True
        finally:
            try:
                engines = [engine.mesh for engine in launcher.engines if engine.mesh is not None]
                await asyncio.shield(_stop([*launcher.meshes, *engines]))
            finally:
                kill_children(others)


class _Launcher:
    """Starts the processes of one run."""

    def __init__(self, specs: ActorSpecs, run_dir: Path, shared: Path, timeline: Timeline):
        # What is to be ended. Generators and reward workers are ended by their replicas.
        self.meshes: list[Any] = []
        self.engines: list[EngineHandle] = []
        self.judge: JudgeServer | None = None
        self.watches: list[Callable[[], Coroutine[Any, Any, None]]] = []  # over what nothing starts again
        self._births: dict[str, Births] = {}
        self._specs = specs
        self._logs = run_dir / "logs"
        self._run_dir = run_dir
        self._shared = shared
        self._timeline = timeline
        num_devices = len(visible_devices())
        self._places = place(
            specs.roles, num_cores(), specs.threads, specs.overlap, num_devices, specs.share_devices
        )
        self._stores: dict[str, Any] = {}  # where the processes of a mesh meet, by its name

    async def start(self) -> Actors:
        """Generators and reward workers are started by who runs their pools; `ready` starts the engines."""
        specs, deadlines = self._specs, self._specs.deadlines
        transport = await self._transport()
        self._store = Caller(specs.transport)
        store = WeightStore(partial(self._release, transport))
        spawn = self._engine_spawner("trainer", specs.trainer, PolicyTrainer, transport)
        trainer = TrainerHandle("trainer", spawn, specs.trainer.config, deadlines, self._timeline)
        critic = self._engine("critic", specs.critic) if specs.critic else None
        reference: Reference | None = ReferenceAdapter(trainer) if specs.reference_is_adapter else None
        self.engines = [trainer, *([critic] if critic else [])]
        if specs.reference:
            engine = self._engine("reference", specs.reference)
            reference = ReferenceMesh(engine, trainer, self._run_dir / "reference")
            self.engines.append(engine)

        async def start_engines() -> None:
            await together(self._start_engine(engine) for engine in self.engines)
            if specs.lora.rank:
                await trainer.add_adapter(POLICY, specs.lora, specs.adapter_seed)
            if specs.reference_is_adapter:
                await trainer.add_adapter(REFERENCE, specs.lora, specs.adapter_seed)

        policy = (POLICY, specs.lora) if specs.lora.rank else None
        generators = self._generators(store, transport, POLICY if policy else MODEL)
        self.judge = self._judge(specs.judge, transport) if specs.judge else None
        others = (store, deadlines, reference, critic, policy)
        self._revival = Revival(start_engines, self.engines, specs.max_trainer_restarts)
        return Actors(trainer, generators, self._rewards(), *others, revival=self._revival)

    async def ready(self, actors: Actors) -> None:
        pools: list[Pool] = [actors.generators, actors.rewards, *([self.judge.pool] if self.judge else [])]
        await together((self._revival.start(), *(pool.started() for pool in pools)))
        if actors.policy is not None:
            await actors.publish_base()
        freeze_heap()

    async def _transport(self) -> Transport:
        if self._specs.transport == "shared_memory":
            return SharedMemory(str(self._shared))
        from rl.weight_sync.torchstore import TorchStore  # not a part of every installation

        mesh = self._spawn("torchstore", Place(1, (), 1))
        births = self._births["torchstore"]
        self.watches.append(partial(births.until_one_dies, "the keeping of published weights"))
        return await births.watching(self._started("torchstore", TorchStore.create(mesh)))

    async def _release(self, transport: Transport, manifest: Manifest) -> None:
        deadline = Deadline("sync", self._specs.deadlines.sync)
        await self._store.call(transport.release(manifest), "release", deadline)

    def _engine(self, role: str, spec: EngineSpec) -> EngineHandle:
        spawn = self._engine_spawner(role, spec, EngineActor)
        return EngineHandle(role, spawn, spec.config, self._specs.deadlines, self._timeline)

    async def _start_engine(self, engine: EngineHandle) -> None:
        try:
            await self._births_of(engine.name).watching(engine.start())
        except ProcessDied as death:
            raise EngineDied(str(death)) from death

    def _engine_spawner(
        self, role: str, spec: EngineSpec, actor: type[EngineActor], *others: Any
    ) -> Callable[[], Awaitable[tuple[Any, Any]]]:
        """others: what such an actor takes beside the engine's own arguments."""

        async def spawn() -> tuple[Any, Any]:
            kill_those_that_log_to(self._logs / role)
            place = self._places[role]
            env = engine_environment(place.num_threads) | GROUP_ENVIRONMENT
            mesh = self._spawn(role, place, env, keep=False)
            self._stores[role] = await self._started(role, join_group(mesh))
            return mesh, mesh.spawn(role, actor, spec.kind, str(spec.model_dir), spec.config, *others)

        return spawn

    def _generators(self, store: WeightStore, transport: Transport, policy: str) -> GeneratorPool:
        specs = self._specs

        def make(number: int, updates: Updates, changed: Signal) -> GeneratorReplica:
            name = f"generator-{number}"
            spawn = self._generator_spawner("generator", number, specs.generator, transport)
            restarts, in_flight = specs.max_generator_restarts, specs.in_flight_updates
            return GeneratorReplica(name, spawn, restarts, in_flight, updates, changed)

        return GeneratorPool("generator", make, specs.num_generators, policy, store)

    def _judge(self, config: VLLMConfig, transport: Transport) -> JudgeServer:
        changed, restarts = Signal(), self._specs.max_generator_restarts
        replicas = []
        for number in range(self._specs.num_judges):
            spawn = self._generator_spawner("judge", number, config, transport)
            replicas.append(JudgeReplica(f"judge-{number}", spawn, restarts, changed))
        return JudgeServer(
            Pool("judge", replicas, changed), HFTokenizer(config.model_dir), config.max_model_len
        )

    def _generator_spawner(
        self, role: str, number: int, config: VLLMConfig, transport: Transport
    ) -> Callable[[], Awaitable[GeneratorProcesses]]:
        specs, name = self._specs, f"{role}-{number}"
        config = replace(config, shared_directory=str(self._shared))
        all_of_them = self._places[role]
        first = number * config.tensor_parallel
        devices = all_of_them.devices[first : first + config.tensor_parallel]
        its_place = Place(config.tensor_parallel, devices, all_of_them.num_threads)
        env = generator_environment(all_of_them.num_threads, config.compile, config.dtype)
        if config.tensor_parallel > 1:
            env |= GROUP_ENVIRONMENT

        async def spawn() -> GeneratorProcesses:
            mesh = self._spawn(name, its_place, env, keep=False)
            if config.tensor_parallel > 1:
                self._stores[name] = await self._started(name, join_group(mesh))
            actors = mesh.spawn("generator", Generator, config, transport)
            return await _ready(GeneratorProcesses(name, mesh, actors, specs.deadlines, self._timeline))

        return lambda: self._births_of(name).watching(spawn())

    def _rewards(self) -> RewardPool:
        specs, changed = self._specs, Signal()
        limit = specs.reward_limit_seconds
        env = engine_environment(1) | (self.judge.environment if self.judge else {})
        if isinstance(specs.env, ChatEnv):
            limit = max(limit, specs.env.turn_seconds, specs.env.episode_seconds)

        def spawner(name: str) -> Callable[[], Awaitable[RewardProcess]]:
            async def spawn() -> RewardProcess:
                assert specs.env is not None
                mesh = self._spawn(name, Place(1, (), 1), env, keep=False)
                actor = mesh.spawn("reward", RewardWorker, specs.env, specs.reward_limit_seconds).slice(
                    procs=0
                )
                return await _ready(RewardProcess(name, mesh, actor, limit, specs.deadlines, self._timeline))

            return lambda: self._births_of(name).watching(spawn())

        names = [f"reward-{i}" for i in range(specs.num_reward_procs)]
        replicas = [Replica(name, spawner(name), specs.max_reward_restarts, changed) for name in names]
        most = specs.env.max_episodes if isinstance(specs.env, ChatEnv) else 0
        return RewardPool("reward worker", replicas, changed, most)

    def _spawn(self, name: str, where: Place, env: dict[str, str] | None = None, keep: bool = True) -> Any:
        """keep: end it at the end of the run; else its owner does."""
        env = engine_environment(where.num_threads) if env is None else env
        env = {**env, **self._births_of(name).expect(where.num_procs)}
        mesh = spawn_procs(name, where.num_procs, env, where.devices, self._logs / name)
        if keep:
            self.meshes.append(mesh)
        return mesh

    def _births_of(self, name: str) -> Births:
        return self._births.setdefault(name, Births(name, self._timeline))

    async def _started(self, name: str, answer: Awaitable[Any]) -> Any:
        return await Caller(name).call(answer, "start", Deadline("start", self._specs.deadlines.start))


async def _ready(member: P) -> P:
    """Once it answers. One that does not is not left behind."""
    try:
        await member.ready()
    except BaseException:
        await asyncio.shield(member.kill())
        raise
    return member


async def _stop(meshes: list[Any]) -> None:
    """Ask the processes to end. Those that cannot answer, as a rank in a collective, are ended by force."""

    async def stop(mesh: Any) -> None:
        await mesh.stop("the run is over")

    with suppress(TimeoutError):
        stopped = asyncio.gather(*(stop(mesh) for mesh in meshes), return_exceptions=True)
        await asyncio.wait_for(stopped, _STOP_SECONDS)


def _append(path: Path, text: str) -> None:
    with suppress(OSError), path.open("a") as file:  # a full disk costs the log, not the run
        file.write(text)
