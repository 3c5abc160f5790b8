"""A whole run over made-up processes: the controller, pools, replicas, handles and store are the real ones.

Every call to a process waits; processes die, hang and come back as a test wants.
"""

import asyncio
import math
import random
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from rl.actors import engine
from rl.actors.actors import Actors, Revival
from rl.actors.engine import EngineHandle
from rl.actors.generator import GeneratorProcesses
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica
from rl.actors.reference import ReferenceAdapter, ReferenceMesh
from rl.actors.remote import ProcessDied
from rl.actors.replica import Replica
from rl.actors.reward import RewardPool, RewardProcess
from rl.actors.trainer import TrainerHandle
from rl.actors.turns import Turns
from rl.config import RunConfig
from rl.config.learning import learning_of
from rl.config.settle import settle
from rl.controller import training_batch
from rl.controller.recovery import train_and_export
from rl.envs.chat.episode import EpisodeRunner
from rl.envs.verifier import score_of
from rl.models.generator.commands import Progress
from rl.models.sources import ModelSource
from rl.models.tokenizer import HFTokenizer
from rl.observability.timeline import Timeline
from rl.processes import ProcessInfo
from rl.types import POLICY, REFERENCE
from rl.waiting import Signal, beside, together
from rl.weight_sync.manifest import MODEL
from rl.weight_sync.store import WeightStore
from tests.controller.fakes import FakeEngine, FakeGenerators, FakeRewards, QuietRecorder
from tests.plans import AMPLE, trainer_config

SECONDS = 0.01  # that a call takes


class FakeMesh:
    """The processes of one actor mesh, as the handles see them. Rank 0 dies; the others then hang, as in NCCL."""

    def __init__(self, name: str, ranks: list, world: "World"):
        self.name, self._ranks, self._world = name, ranks, world
        self.is_dead = self.is_hung = False
        self._death = asyncio.Event()

    def slice(self, procs):
        return _Rank(self, procs)

    async def stop(self, why):
        await asyncio.sleep(SECONDS)
        self.die()

    def die(self):
        self.is_dead = True
        self._death.set()

    def __getattr__(self, method):
        return getattr(_Rank(self, 0), method)

    async def call(self, rank, method, arguments):
        work = asyncio.create_task(self._answer(rank, method, arguments))
        death = asyncio.create_task(self._death.wait())
        try:
            await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
            if self.is_dead and rank:
                await asyncio.sleep(1e6)
            if self.is_dead:
                raise SupervisionError(f"the process of {self.name} was killed")
            return {0: await work}
        finally:
            work.cancel()
            death.cancel()

    async def _answer(self, rank, method, arguments):
        await asyncio.sleep(SECONDS * self._world.rng.random() * self._world.slowness(self.name, method))
        while self.is_hung:
            await asyncio.sleep(1e6)
        if method == "ready":
            return ProcessInfo(1, "a host that is not here", "cpu")
        return await getattr(self._ranks[rank], method)(*arguments)


@dataclass
class _Rank:
    mesh: FakeMesh
    rank: int

    def __getattr__(self, method):
        return SimpleNamespace(call=lambda *arguments: self.mesh.call(self.rank, method, arguments))


class Engine:
    """What an engine's rank answers."""

    def __init__(self, name, config, fail_on=None, mismatch=0.0):
        self.fake = FakeEngine(name, [], config, fail_on)
        self._mismatch = mismatch
        self.adapters = set()

    async def packing(self):
        return {}

    async def forward_backward(self, batch, loss, adapter):
        learned = await self.fake.forward_backward(batch, loss, adapter)
        return learned | {"logprob_diff:sum": self._mismatch * learned["tokens:sum"]}

    async def publish_weights(self, version, adapter):
        return []

    async def add_adapter(self, name, lora, seed):
        self.adapters.add(name)

    def __getattr__(self, method):
        return getattr(self.fake, method)


class Generator(FakeGenerators):
    served = None

    def __init__(self, store, policy):
        super().__init__([], store, policy)
        self._num_ticks = 0

    async def progress(self):
        self._num_ticks += 1
        return Progress(self._num_ticks, 0)

    async def load_weights(self, manifest):
        self.served = manifest.version

    async def suspend(self):
        self.served = None

    async def give_up_samples(self, keys=None):
        pass

    async def sample(self, prompt, n, params, wave, key):
        return await super().sample(prompt, n, params)


class Reward(FakeRewards):
    """Episodes run here, in the test's own process."""

    def __init__(self, env):
        self._env, self._episodes = env, {}

    async def ask_episode(self, call):
        if call.opens:
            self._episodes[call.number] = EpisodeRunner(self._env, self._env.tools(), *call.opens)
        runner = self._episodes[call.number]
        if call.verb == "score":
            return score_of(runner.reward(*call.arguments))
        reply = getattr(runner, call.verb)(*call.arguments)
        return (
            replace(reply, score=score_of(runner.reward())) if call.verb == "step" and reply.done else reply
        )

    async def close_episode(self, number):
        self._episodes.pop(number, None)


class Recorder(QuietRecorder):
    """Forgets steps that happen again."""

    @property
    def accuracies(self):
        return self.evaluations

    async def rewind(self, step):
        await asyncio.sleep(0)
        for lines in (self.steps, self.evaluations):
            for number in [number for number in lines if number > step]:
                del lines[number]


@cache
def _tokenizer(model: ModelSource) -> HFTokenizer:
    """Of each model one, as it takes a third of a short run's time to make."""
    with tempfile.TemporaryDirectory() as directory:
        return HFTokenizer(model.materialize(Path(directory)))


@dataclass
class World:
    """`kill` and `hang` take a role: trainer, critic, reference, generator, reward."""

    config: RunConfig
    run_dir: Path
    num_generators: int = 1
    restarts: int = 3
    fail_on: tuple | None = None
    mismatch: float = 0.0  # nats a token between trainer and generator
    slow: dict[str, float] = field(default_factory=dict)  # part of "process.method" -> times as slow
    in_threads: bool = False  # what only large batches are computed in
    seed: int = 0
    meshes: dict[str, FakeMesh] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)  # roles whose processes never start again

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.timeline = Timeline()
        self.recorder = Recorder(self.run_dir)

    def slowness(self, name, method) -> float:
        return math.prod(times for part, times in self.slow.items() if part in f"{name}.{method}")

    def mesh(self, role, *ranks) -> FakeMesh:
        if role.split("-")[0] in self.gone:
            raise ProcessDied(f"the processes of {role} did not all start")
        self.meshes[role] = FakeMesh(role, list(ranks), self)
        return self.meshes[role]

    def _of(self, role):
        return [mesh for name, mesh in self.meshes.items() if name.split("-")[0] == role]

    def kill(self, role, for_good=False):
        if for_good:
            self.gone.add(role)
        for mesh in self._of(role):
            mesh.die()

    def hang(self, role):
        for mesh in self._of(role):
            mesh.is_hung = True

    async def _release(self, manifest):
        await asyncio.sleep(SECONDS)

    def engine(self, role, kind):
        config = trainer_config(self.config)

        async def spawn():
            await asyncio.sleep(SECONDS)
            fails = self.fail_on if role == "trainer" else None
            ranks = range(config.layout.num_procs)
            mesh = self.mesh(role, *(Engine(role, config, fails, self.mismatch) for _ in ranks))
            return mesh, mesh

        return kind(role, spawn, config, self.config.deadlines, self.timeline)

    def actors(self) -> tuple[Actors, Revival]:
        config, deadlines = self.config, self.config.deadlines
        policy = (POLICY, config.trainer.lora) if config.trainer.lora.rank else None
        name = POLICY if policy else MODEL
        store = WeightStore(self._release)
        trainer = self.engine("trainer", TrainerHandle)
        engines: list[EngineHandle] = [trainer]
        others, reference = {}, None
        if config.algorithm.needs_critic:
            others["critic"] = self.engine("critic", EngineHandle)
            engines.append(others["critic"])
        if config.reference_is_adapter:
            reference = ReferenceAdapter(trainer)
        elif config.algorithm.needs_reference:
            engines.append(self.engine("reference", EngineHandle))
            reference = ReferenceMesh(engines[-1], trainer, self.run_dir)

        async def start():
            await together(engine.start() for engine in engines)
            if policy:
                await trainer.add_adapter(POLICY, config.trainer.lora, 0)
            if config.reference_is_adapter:
                await trainer.add_adapter(REFERENCE, config.trainer.lora, 0)

        turns = Turns(settle(config, cluster=AMPLE).stays, engines, self.run_dir, store.changed)

        def make(number, updates, changed):
            async def spawn():
                await asyncio.sleep(SECONDS)
                mesh = self.mesh(f"generator-{number}", Generator(store, name))
                member = GeneratorProcesses(f"generator-{number}", mesh, mesh, deadlines, self.timeline)
                await member.ready()
                return member

            mode = config.generator.updates
            return GeneratorReplica(
                f"generator-{number}", spawn, self.restarts, mode, updates, changed, turns
            )

        async def spawn_reward():
            await asyncio.sleep(SECONDS)
            mesh = self.mesh("reward-0", Reward(self.config.env))
            member = RewardProcess("reward-0", mesh, mesh, 5.0, deadlines, self.timeline)
            await member.ready()
            return member

        changed = Signal()
        rewards = [Replica("reward-0", spawn_reward, self.restarts, changed)]
        generators = GeneratorPool("generator", make, self.num_generators, name, store)
        pool = RewardPool("reward worker", rewards, changed, 2)
        revival = Revival(start, engines, self.restarts)
        rest = (store, deadlines, others, reference, policy, revival, turns)
        return Actors(trainer, generators, pool, *rest), revival

    async def run(self) -> None:
        """As `launch` and `run_recipe` do it."""
        if not self.in_threads:
            return await self._run()
        with patch.object(engine, "_MANY", 0), patch.object(training_batch, "_MANY_ROLLOUTS", 0):
            await self._run()

    async def _run(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        tokenizer = _tokenizer(self.config.model)
        actors, revival = self.actors()
        async with beside(actors.generators.run(), actors.rewards.run()):
            in_turn = actors.turns.alternate
            pools = [actors.rewards, *([] if in_turn else [actors.generators])]
            await together((revival.start(), *(pool.started() for pool in pools)))
            if actors.policy is not None:
                await actors.publish_base()
            if in_turn:
                await actors.first_turn()
                await actors.generators.started()
            await train_and_export(
                learning_of(self.config), self.config.resume, actors, tokenizer, self.recorder, goes_on=False
            )

    @property
    def numbers(self) -> list[dict]:
        """The metrics of steps and evaluations, without what deaths may change."""
        may_differ = ("time/", "buffer/", "generators/", "tokens/prompt", "tokens/prompt_computed")
        recorder = self.recorder
        return [
            {n: v for n, v in metrics.items() if not n.startswith(may_differ) and v == v}
            for lines in (recorder.steps, recorder.evaluations)
            for _, metrics in sorted(lines.items())
        ]
