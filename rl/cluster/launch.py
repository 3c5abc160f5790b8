"""Launch: start every process of a run and wait until each is ready; on the way out, end them all."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rl.actors.actors import Actors, Revival
from rl.actors.engine import EngineHandle
from rl.actors.engine_actor import EngineActor
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica, Updates
from rl.actors.judge import JudgeReplica, JudgeServer
from rl.actors.reference import Reference, ReferenceAdapter, ReferenceMesh
from rl.actors.remote import Caller, Deadline, EngineDied, ProcessDied
from rl.actors.replica import Pool, Replica
from rl.actors.reward import RewardPool
from rl.actors.trainer import PolicyTrainer, TrainerHandle
from rl.actors.turns import Turns
from rl.cluster.ends import kill_children
from rl.cluster.launchers import Hosts, Launcher, ThisHost
from rl.cluster.spawner import Spawner, spec_of
from rl.envs.base import Env
from rl.envs.chat.env import ChatEnv
from rl.interfaces import Transport
from rl.models.engine_config import EngineConfig
from rl.models.tokenizer import HFTokenizer
from rl.observability.timeline import Timeline
from rl.owned_directory import SHARED_MEMORY, owned_directory, temporary_files
from rl.plan.fit import host_name
from rl.plan.roles import ENGINE_ROLES
from rl.plan.types import EngineSpec, Fallback, GeneratorSpec, Plan
from rl.plan.types import Replica as ReplicaPlan
from rl.processes import adopt_orphans, allow_many_files, freeze_heap, reap_orphans
from rl.types import POLICY, REFERENCE
from rl.waiting import Signal, beside, together
from rl.weight_sync.buffers import keys
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.shared_memory import SharedMemory
from rl.weight_sync.store import WeightStore

_STOP_SECONDS = 4.0
_log = logging.getLogger(__name__)


@asynccontextmanager
async def launch(
    plan: Plan,
    models: Mapping[str, Path],
    run_dir: Path,
    env: Env | None = None,
    timeline: Timeline | None = None,
    launcher: Launcher | None = None,
    engines_without: Fallback | None = None,
) -> AsyncIterator[Actors]:
    """The running actors. Whatever happens within, no process and no shared memory is left behind.

    models: directories of the models that the plan names. env: what reward workers score by. launcher: where
    processes are spawned; None: on the plan's hosts. engines_without: engines as they are without lost hosts,
    or why they cannot go on; None: they wait for every host.
    """
    import monarch.actor

    run_dir = run_dir.absolute()  # other hosts have other working directories
    models = {name: directory.absolute() for name, directory in models.items()}
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
        earlier_children = {child.pid for child in psutil.Process().children(recursive=True)}
        launcher = launcher or launcher_of(plan)
        start = _Start(plan, models, run_dir, shared, env, timeline or Timeline(), launcher, engines_without)
        async with launcher.open(run_dir, shared, models):
            try:
                actors = await start.actors()
                judge = [start.judge.run()] if start.judge else []
                watches = [watch() for watch in start.watches]
                pools = actors.generators.run(), actors.rewards.run()
                async with beside(reap_orphans(), *pools, *judge, *watches):
                    await start.ready(actors)
                    try:
                        yield actors
                    finally:
                        is_over = True
            finally:
                try:
                    engines = [engine.mesh for engine in start.engines if engine.mesh is not None]
                    await asyncio.shield(_stop([*start.meshes, *engines]))
                finally:
                    kill_children(earlier_children)


def launcher_of(plan: Plan) -> Launcher:
    """By whether its hosts have addresses."""
    return Hosts(plan) if any(host.address for host in plan.cluster.hosts) else ThisHost(plan.cluster)


class _Start:
    """The start of one plan's replicas."""

    def __init__(
        self,
        plan: Plan,
        models: Mapping[str, Path],
        run_dir: Path,
        shared: Path,
        env: Env | None,
        timeline: Timeline,
        launcher: Launcher,
        engines_without: Fallback | None = None,
    ):
        # What is to be ended. Generators and reward workers are ended by their replicas.
        self.meshes: list[Any] = []
        self.engines: list[EngineHandle] = []
        self.judge: JudgeServer | None = None
        self.watches: list[Callable[[], Coroutine[Any, Any, None]]] = []  # over what nothing starts again
        self._plan, self._models = plan, models
        self._run_dir, self._shared = run_dir, shared
        self._env = env
        self._timeline = timeline
        self._launcher = launcher
        self._engines_without = engines_without
        self._planned_engines = tuple(r for r in plan.replicas if r.role in ENGINE_ROLES)
        self._engine_hosts = _hosts_of(self._planned_engines)
        logs = run_dir / "logs"
        self._spawner = Spawner(launcher, models, logs, shared, plan.deadlines, timeline)

    async def actors(self) -> Actors:
        """Generators and reward workers are started by who runs their pools; `ready` starts the engines."""
        plan, deadlines = self._plan, self._plan.deadlines
        transport = await self._transport()
        store = WeightStore(partial(self._release, Caller(plan.transport), transport))
        (of_trainer,) = plan.of("trainer")
        trainer = TrainerHandle(*self._way(of_trainer, transport), deadlines, self._timeline)
        others = {r.role: self._engine(r, transport) for r in self._planned_engines if r is not of_trainer}
        self.engines = [trainer, *others.values()]
        adapters = {adapter.name: adapter for adapter in spec_of(of_trainer, EngineSpec).adapters}
        reference: Reference | None = ReferenceAdapter(trainer) if REFERENCE in adapters else None
        if "reference" in others:
            reference = ReferenceMesh(others["reference"], trainer, self._run_dir)

        async def start_engines() -> None:
            await self._place_engines(transport)
            await together(self._start_engine(engine) for engine in self.engines)
            for adapter in adapters.values():
                await trainer.add_adapter(adapter.name, adapter.lora, adapter.seed)

        policy = (POLICY, adapters[POLICY].lora) if POLICY in adapters else None
        self._turns = Turns(plan.stays, self.engines, self._run_dir, store.changed)
        generators = self._generators(store, transport, POLICY if policy else MODEL)
        self.judge = self._judge(plan.of("judge"), transport) if plan.of("judge") else None
        self._revival = Revival(start_engines, self.engines, of_trainer.max_restarts)
        return Actors(
            trainer=trainer,
            generators=generators,
            rewards=self._rewards(),
            store=store,
            deadlines=deadlines,
            engines=others,
            reference=reference,
            policy=policy,
            revival=self._revival,
            turns=self._turns,
            address=self._launcher.address,
        )

    async def ready(self, actors: Actors) -> None:
        """Where they take turns, generators are spawned once the engines have left their devices."""
        pools: list[Pool] = [actors.rewards, *([self.judge.pool] if self.judge else [])]
        if not self._turns.alternate:
            pools.append(actors.generators)
        await together((self._revival.start(), *(pool.started() for pool in pools)))
        if actors.policy is not None:
            await actors.publish_base()
        if self._turns.alternate:
            await actors.first_turn()
            await actors.generators.started()
        freeze_heap()

    async def _transport(self) -> Transport:
        if self._plan.transport == "shared_memory":
            return SharedMemory(str(self._shared), self._launcher.run, self._plan.delta)
        from rl.weight_sync.torchstore import TorchStore  # not a part of every installation

        mesh = await self._spawner.storage("torchstore")
        self.meshes.append(mesh)
        births = self._spawner.births_of("torchstore")
        self.watches.append(partial(births.until_one_dies, "the keeping of published weights"))
        return await births.watching(self._spawner.started("torchstore", TorchStore.create(mesh.mesh)))

    async def _release(self, store: Caller, transport: Transport, manifest: Manifest) -> None:
        deadline = Deadline("sync", self._plan.deadlines.sync)
        await store.call(transport.release(manifest), "release", deadline)
        await self._launcher.release(keys(manifest))

    def _engine(self, replica: ReplicaPlan, transport: Transport) -> EngineHandle:
        """Of another than the trainer."""
        return EngineHandle(*self._way(replica, transport), self._plan.deadlines, self._timeline)

    def _way(self, replica: ReplicaPlan, transport: Transport) -> tuple[str, Any, EngineConfig]:
        """An engine's name, and how it is started."""
        actor, arguments = (PolicyTrainer, [transport]) if replica.role == "trainer" else (EngineActor, [])
        spawn = self._spawner.engine(replica, actor, *arguments)
        return replica.name, spawn, spec_of(replica, EngineSpec).config

    async def _place_engines(self, transport: Transport) -> None:
        """On all of their hosts; or, where some are lost, as the plan has it without those."""
        if self._engines_without is None:
            return
        cluster, replicas = self._plan.cluster, self._planned_engines
        present = [number for number, host in enumerate(cluster.hosts) if not host.may_join]
        lost = await self._launcher.lost(self._engine_hosts, present)
        if lost & _hosts_of(replicas):
            left = self._engines_without(lost)
            gone = sorted(lost & _hosts_of(replicas))
            names = ", ".join(host_name(host, cluster) for host in gone)
            how = f"they wait for it: {left}" if isinstance(left, str) else "they go on without it"
            _log.warning("%s, where engines are, does not answer; %s", names, how)
            replicas = replicas if isinstance(left, str) else left
        self._engine_hosts = _hosts_of(replicas)
        by_name = {replica.name: replica for replica in replicas}
        for engine in self.engines:
            _, spawn, config = self._way(by_name[engine.name], transport)
            engine.place(spawn, config)
            self._timeline.move(engine.name, _hosts_of([by_name[engine.name]]))

    async def _start_engine(self, engine: EngineHandle) -> None:
        try:
            await self._spawner.births_of(engine.name).watching(engine.start())
        except ProcessDied as death:
            raise EngineDied(str(death)) from death

    def _generators(self, store: WeightStore, transport: Transport, policy: str) -> GeneratorPool:
        replicas = self._plan.of("generator")

        def make(number: int, updates: Updates, changed: Signal) -> GeneratorReplica:
            replica = replicas[number]
            spawn = self._spawner.generator(replica, transport)
            mode = spec_of(replica, GeneratorSpec).updates
            restarts, turns = replica.max_restarts, self._turns
            host = self._launcher.visitor(replica.processes[0].host)
            return GeneratorReplica(replica.name, spawn, restarts, mode, updates, changed, turns, host)

        return GeneratorPool("generator", make, len(replicas), policy, store)

    def _judge(self, of_judge: Sequence[ReplicaPlan], transport: Transport) -> JudgeServer:
        changed, spec = Signal(), spec_of(of_judge[0], GeneratorSpec)
        replicas = [
            JudgeReplica(r.name, self._spawner.generator(r, transport), r.max_restarts, changed)
            for r in of_judge
        ]
        tokenizer = HFTokenizer(self._models[spec.model])
        pool, address = Pool("judge", replicas, changed), self._launcher.address
        return JudgeServer(pool, tokenizer, spec.config.max_model_len, address)

    def _rewards(self) -> RewardPool:
        env, changed, replicas = self._env, Signal(), []
        judge = self.judge.environment if self.judge else {}
        for r in self._plan.of("reward"):
            assert env is not None, "reward workers score by an environment"
            replicas.append(Replica(r.name, self._spawner.reward(r, env, judge), r.max_restarts, changed))
        most = env.max_episodes if isinstance(env, ChatEnv) else 0
        return RewardPool("reward worker", replicas, changed, most)


def _hosts_of(replicas: Sequence[ReplicaPlan]) -> frozenset[int]:
    return frozenset(host for replica in replicas for host in replica.hosts)


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
