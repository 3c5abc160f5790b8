"""Hosts, links and failures; and a whole run on them, by the project's own Plan, pools, store, buffer and recovery."""

import asyncio
import io
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.fakes import AtOnce
from benchmarks.simulation.clock import SimulatedLoop
from benchmarks.simulation.processes import Generator, Remote, RewardWorker, Trainer, completion
from benchmarks.simulation.seconds import Machine, Work
from benchmarks.simulation.shares import Shared
from rl.actors.actors import Actors, Revival
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica, Updates
from rl.actors.replica import Replica
from rl.actors.reward import RewardPool
from rl.config import RunConfig
from rl.config.learning import learning_of
from rl.config.settle import settle
from rl.controller.recovery import train_and_export
from rl.models.tokenizer import HFTokenizer
from rl.observability.recorder import Recorder
from rl.observability.sinks import TrackingConfig, open_sinks
from rl.observability.timeline import Timeline
from rl.plan.cluster import Cluster
from rl.plan.model_shape import BYTES, ModelShape
from rl.plan.types import EngineSpec, GeneratorSpec, Plan
from rl.plan.types import Replica as ReplicaPlan
from rl.types import Completion, VersionRange
from rl.waiting import Signal, beside, together
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore

_SMALL = 1 << 16  # bytes: what is less takes its latency alone, whatever else is on the link
_LAG_SECONDS = 0.5


@dataclass(frozen=True)
class Workload:
    """What the recipe does not say. lengths: of answers, one drawn for each. prompt_tokens: on average. shared_tokens:
    the same ones of every prompt, which a generator has in its cache."""

    lengths: Sequence[int]
    prompt_tokens: int = 0
    shared_tokens: int = 0


@dataclass(frozen=True)
class Options:
    """failures_per_hour: of each of the hosts `failing`. tree: a host that has a version sends it to others, to
    `fan_out` at a time. relay: processes whose messages reach the controller as one. delta: the share of a version's
    bytes that goes between hosts. speed: of the controller's core; see SimulatedLoop."""

    seed: int = 0
    failures_per_hour: float = 0.0
    failing: tuple[int, ...] = ()
    tree: bool = False
    fan_out: int = 2
    relay: int = 1
    delta: float = 1.0
    speed: float = 1.0


@dataclass(frozen=True)
class Totals:
    """Of a run until the end of a step. at: seconds. controller: seconds of its core, generators: of all of them."""

    at: float
    controller: float
    generators: float
    sent: list[float]
    received: list[float]


@dataclass(frozen=True)
class Steady:
    """Of the steps but the first, which fills the pipeline, and the last, which empties it.

    step: seconds of one. The others: for which share of the time each is busy. links: the fullest of them.
    """

    step: float
    generators: float
    trainer: float
    controller: float
    links: float


@dataclass
class Outcome:
    """Seconds are those of the simulated clock. steps: each one's metrics. sent, received: bytes by host.
    totals: by step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    totals: dict[int, Totals] = field(default_factory=dict)
    seconds: float = 0.0
    controller: float = 0.0  # seconds for which its core worked
    lags: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    trainer_busy: float = 0.0
    fetches: list[float] = field(
        default_factory=list
    )  # seconds from a version's publishing until a host has it
    num_failures: int = 0
    restarts: int = 0  # of the trainer

    def steady(self, num_generators: int, link: float) -> Steady:
        """Of a run of three steps or more. link: bytes a second, each way."""
        middle, numbers = self.steps[1:-1], sorted(self.totals)
        first, last = self.totals[numbers[0]], self.totals[numbers[-2]]
        seconds = last.at - first.at
        bytes_before, bytes_after = [*first.sent, *first.received], [*last.sent, *last.received]
        most = max(after - before for before, after in zip(bytes_before, bytes_after, strict=True))
        idle = sum(step["idle/trainer"] for step in middle)
        return Steady(
            seconds / len(middle),
            (last.generators - first.generators) / num_generators / seconds,
            1 - idle / sum(step["time/step"] for step in middle),
            (last.controller - first.controller) / seconds,
            most / link / seconds,
        )


class World:
    """What processes ask of their surroundings."""

    def __init__(
        self,
        plan: Plan,
        hf_config: dict,
        machine: Machine,
        work: Workload,
        options: Options,
    ):
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        self.loop, self.plan, self.machine, self.options = loop, plan, machine, options
        self.hf_config, self.shape = hf_config, ModelShape.of(hf_config)
        self.shared_tokens = work.shared_tokens
        self.timeline = Timeline(clock=loop.time, hosts=plan.hosts)
        self._lengths = np.array(work.lengths)
        self._most, self._context = max(work.lengths), work.prompt_tokens + int(np.mean(work.lengths)) // 2
        self._rng, self._tokens = random.Random(options.seed), np.random.default_rng(options.seed)
        hosts = range(len(plan.cluster.hosts))
        self.up, self.down = ([Shared(loop, lambda n: machine.link / n) for _ in hosts] for _ in range(2))
        self._whole: dict[int, set[int]] = {}  # version -> hosts that have all of it
        self._shards: dict[int, tuple[int, ...]] = {}
        self._published: dict[int, float] = {}
        self._fetching: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._sending = [0 for _ in hosts]
        self._sent = Signal()
        self._there: set[Remote] = set()
        self._lost: set[int] = set()
        self._returned = Signal()
        self.outcome = Outcome()

    # ---- the workload

    def lengths(self, n: int) -> list[int]:
        return self._tokens.choice(self._lengths, n).tolist()

    def completion(self, length: int, versions: VersionRange) -> Completion:
        return completion(self._tokens, length, self._most, self.shape.vocab_size, versions)

    def work_of(self, replica: ReplicaPlan, rank: int = 0) -> Work:
        process, spec = replica.processes[rank], replica.spec
        assert isinstance(spec, EngineSpec | GeneratorSpec)
        device = self.machine.device(process.threads, bool(process.gpus))
        config = spec.config
        parts = config.layout.tensor_parallel if isinstance(spec, EngineSpec) else len(replica.processes)
        recomputes = isinstance(spec, EngineSpec) and spec.config.activation_checkpointing == "full"
        return Work(
            self.shape, config.dtype, device, self.machine.overheads, parts, self._context, recomputes
        )

    # ---- messages

    def sent(self, host: int, size: int, to_controller: bool) -> list[tuple[Shared, float]]:
        """What a message between the controller and a process takes of links. The controller's core pays for it."""
        controls = self.machine.controls
        self.loop.charge(controls.call / 2 / self.options.relay + size * controls.byte)
        if not host:
            return []
        source, target = (host, 0) if to_controller else (0, host)
        if size >= _SMALL:
            return [(self.up[source], size), (self.down[target], size)]
        self.up[source].done += size
        self.down[target].done += size
        return []

    # ---- weights

    def published(self, version: int, hosts: Sequence[int]) -> None:
        """Each of the hosts has shards of it."""
        self._shards[version] = tuple(dict.fromkeys(hosts))
        self._whole[version] = {*self._shards[version]} if len(self._shards[version]) == 1 else set()
        self._published[version] = self.loop.time()
        for old in [v for v in self._shards if v < version - 3]:
            del self._shards[old], self._whole[old], self._published[old]

    async def fetch(self, process: Remote, version: int) -> None:
        """Once for each host, whoever asks."""
        (host,) = process.hosts
        key = host, version
        while host not in self._whole.get(version, ()) and version in self._shards:
            if key in self._fetching:
                await process.wait(self._fetching[key])
                continue
            self._fetching[key] = self.loop.create_future()
            try:
                await self._fetch(process, host, version)
            finally:
                self._fetching.pop(key).set_result(None)

    async def _fetch(self, process: Remote, host: int, version: int) -> None:
        shards = self._shards[version]
        size = self.shape.num_parameters * BYTES[self._dtype]
        if version - 1 in self._whole and host in self._whole[version - 1]:
            size *= self.options.delta
        missing = size * sum(source != host for source in shards) / len(shards)
        senders = [source for source in shards if source != host]
        if self.options.tree:
            senders = await self._sender(process, host, version, senders)
        for source in senders:
            self._sending[source] += 1
        try:
            each = missing / len(senders)
            await process.use(*((self.up[source], each) for source in senders), (self.down[host], missing))
        finally:
            for source in senders:
                self._sending[source] -= 1
            self._sent.notify()
        if version in self._whole:
            self._whole[version].add(host)
            self.outcome.fetches.append(self.loop.time() - self._published[version])

    async def _sender(self, process: Remote, host: int, version: int, shards: list[int]) -> list[int]:
        """Of those that have all of it the one that sends to fewest; the first have it from all that have shards."""

        def free() -> list[int]:
            able = self._whole.get(version) or shards
            return [each for each in able if each != host and self._sending[each] < self.options.fan_out]

        while not free():
            await process.wait(asyncio.ensure_future(self._sent.wait()))
        if not self._whole.get(version):
            return shards
        return [min(free(), key=lambda each: (self._sending[each], each))]

    @property
    def _dtype(self) -> str:
        spec = self.plan.of("generator")[0].spec
        assert isinstance(spec, GeneratorSpec)
        return spec.config.dtype

    def between_hosts(self, trainer: Trainer, method: str, num_rows: int) -> float:
        """Seconds of a trainer's collectives on its links, one after the other with its computing.

        For each row FSDP gathers the weights, twice where gradients follow, and reduces the gradients within a copy of
        the model; then copies add theirs up, a row's, too (torch's default, which the engine leaves as it is).
        """
        layout, hosts = trainer.config.layout, trainer.hosts
        a_copy = len(hosts) // layout.replicate
        spanned = max(len({*hosts[i : i + a_copy]}) for i in range(0, len(hosts), a_copy))
        parameters, learns = self.shape.num_parameters, method == "forward_backward"
        gathered = (2 if learns else 1) * BYTES[self._dtype] * parameters + (4 * parameters if learns else 0)
        size = num_rows * gathered * (spanned - 1) / spanned
        if learns and len({*hosts}) > spanned:
            size += num_rows * 2 * 4 * parameters / spanned * (layout.replicate - 1) / layout.replicate
        for host in {*hosts} if size else ():
            self.up[host].done += size
            self.down[host].done += size
        return size / self.machine.link

    # ---- failures

    def comes(self, process: Remote) -> None:
        self._there.add(process)
        if self._lost.intersection(process.hosts):
            process.die()

    def leaves(self, process: Remote) -> None:
        self._there.discard(process)

    async def back(self, host: int) -> None:
        await self._returned.wait_for(lambda: host not in self._lost)

    async def fail(self) -> None:
        """Hosts are lost, each at its own rate, and come back. Never returns."""
        rate = self.options.failures_per_hour / 3600

        async def lose(host: int) -> None:
            while True:
                await asyncio.sleep(self._rng.expovariate(rate))
                self.outcome.num_failures += 1
                self._lost.add(host)
                for whole in self._whole.values():  # what it had is gone; what it was sending comes no more
                    whole.discard(host)
                for process in [each for each in self._there if host in each.hosts]:
                    process.die()
                await asyncio.sleep(self.machine.controls.repair)
                self._lost.discard(host)
                self._returned.notify()

        if rate:
            await together(lose(host) for host in self.options.failing)
        await asyncio.Event().wait()

    # ---- what is measured

    async def measure_lag(self) -> None:
        while True:
            due = self.loop.time() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            self.outcome.lags.append(self.loop.time() - due)


class _Run:
    """The actors of a Plan, and what is left of them."""

    def __init__(self, config: RunConfig, world: World, run_dir: Path):
        self.world, self._config, self._plan = world, config, world.plan
        self.generators: list[Generator] = []
        (of_trainer,) = self._plan.of("trainer")
        assert isinstance(of_trainer.spec, EngineSpec)
        hosts = [process.host for process in of_trainer.processes]
        self.trainer = Trainer(
            world, hosts, lambda rank: world.work_of(of_trainer, rank), of_trainer.spec.config,
            self._plan.deadlines, world.timeline,
        )  # fmt: skip
        self._max_restarts = of_trainer.max_restarts

    def totals(self) -> Totals:
        world = self.world
        return Totals(
            world.loop.time(), world.loop.busy, sum(generator.seconds_busy for generator in self.generators),
            [up.done for up in world.up], [down.done for down in world.down],
        )  # fmt: skip

    def actors(self) -> Actors:
        async def released(manifest: Manifest) -> None:
            pass

        plan, store, changed = self._plan, WeightStore(released), Signal()
        of_generators, of_rewards = plan.of("generator"), plan.of("reward")

        def make(number: int, updates: Updates, notified: Signal) -> GeneratorReplica:
            replica = of_generators[number]
            spec = replica.spec
            assert isinstance(spec, GeneratorSpec)
            return GeneratorReplica(
                replica.name,
                lambda: self._generator(replica),
                replica.max_restarts,
                spec.updates,
                updates,
                notified,
            )

        generators = GeneratorPool("generator", make, len(of_generators), MODEL, store)
        rewards = [
            Replica(each.name, lambda each=each: self._reward(each), each.max_restarts, changed)
            for each in of_rewards
        ]
        pool = RewardPool("reward worker", rewards, changed, max_episodes=0)
        revival = Revival(self.trainer.start, [self.trainer], self._max_restarts)
        self.revival = revival
        return Actors(self.trainer, generators, pool, store, plan.deadlines, revival=revival)

    async def _generator(self, replica: ReplicaPlan) -> Generator:
        world, host, spec = self.world, replica.processes[0].host, replica.spec
        assert isinstance(spec, GeneratorSpec)
        await self._started(host)
        generator = Generator(replica.name, world, host, world.work_of(replica), spec.config)
        self.generators.append(generator)
        world.comes(generator)
        return generator

    async def _reward(self, replica: ReplicaPlan) -> RewardWorker:
        host = replica.processes[0].host
        await self._started(host)
        worker = RewardWorker(replica.name, self.world, host)
        self.world.comes(worker)
        return worker

    async def _started(self, host: int) -> None:
        await self.world.back(host)
        await asyncio.sleep(self.world.machine.controls.start)


@asynccontextmanager
async def _recorded(config: RunConfig, run: _Run, run_dir: Path) -> AsyncIterator[Recorder]:
    world = run.world
    sinks = open_sinks(TrackingConfig(sinks=("tensorboard",)), run_dir, {})
    recorder = Recorder(run_dir, config.steps, world.timeline, sinks, out=io.StringIO())
    step = recorder.step

    def keep(number: int, metrics: dict[str, float], *others: object) -> None:
        began = world.loop.time()
        own = world.timeline.window  # its numbers are the recorder's, which asks once

        def window() -> dict[str, float]:
            numbers = own()
            world.outcome.steps.append(dict(metrics) | numbers | {"at": began, "number": number})
            with world.loop.spare():
                world.outcome.totals[number] = run.totals()
            return numbers

        with mock.patch.object(world.timeline, "window", window):
            step(number, metrics, *others)

    with mock.patch.object(recorder, "step", keep):
        async with recorder:
            yield recorder


def simulate(
    config: RunConfig, cluster: Cluster, machine: Machine, work: Workload, options: Options = Options()
) -> Outcome:
    """A whole run but for its warm-up and its evaluations."""
    plan = settle(config, cluster=cluster)
    loop = SimulatedLoop(options.speed)
    with (
        tempfile.TemporaryDirectory(prefix="rl-simulation-") as directory,
        mock.patch("rl.observability.files.Writer", AtOnce),
        mock.patch("rl.observability.sinks.Writer", AtOnce),
        mock.patch.object(time, "monotonic", loop.time),
    ):
        run_dir = Path(directory)
        tokenizer = HFTokenizer(config.model.materialize(run_dir))

        async def main() -> Outcome:
            world = World(plan, config.model.config(), machine, work, options)
            run = _Run(config, world, run_dir)
            actors = run.actors()
            async with (
                _recorded(config, run, run_dir) as recorder,
                beside(actors.generators.run(), actors.rewards.run(), world.measure_lag()),
            ):
                await together((run.revival.start(), actors.generators.started(), actors.rewards.started()))
                began, busy = loop.time(), loop.busy
                outcome = world.outcome
                outcome.lags.clear()
                learning = learning_of(config)
                async with beside(world.fail()):
                    await train_and_export(
                        learning, config.resume, actors, tokenizer, recorder, goes_on=False
                    )
                outcome.seconds, outcome.controller = loop.time() - began, loop.busy - busy
                outcome.steps = list({int(step["number"]): step for step in outcome.steps}.values())
            outcome.restarts = run.revival.num_restarts
            outcome.sent, outcome.received = [up.done for up in world.up], [down.done for down in world.down]
            idle = sum(step["idle/trainer"] for step in outcome.steps)
            outcome.trainer_busy = 1 - idle / sum(step["time/step"] for step in outcome.steps)
            return outcome

        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main())
