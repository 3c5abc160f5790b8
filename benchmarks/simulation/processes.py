"""Processes that take the time of real ones: generators, reward workers, the trainer."""

import asyncio
import json
import pickle
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from benchmarks.simulation.clock import SimulatedLoop, Spared
from benchmarks.simulation.seconds import Work
from benchmarks.simulation.shares import Shared
from rl.actors.remote import EngineDied, ProcessDied
from rl.actors.trainer import TrainerHandle
from rl.models.checkpoint_dir import prune
from rl.models.engine_config import EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.models.packing import packing
from rl.observability.timeline import Timeline
from rl.types import Completion, Score, StopReason, VersionRange
from rl.waiting import Deadlines
from rl.weight_sync.manifest import Manifest

if TYPE_CHECKING:
    from benchmarks.simulation.world import World

ASK_BYTES = 500
"""Of a message with nothing of size in it."""


class Remote:
    """What processes on hosts have in common: calls to them cost, and end where a host does.

    All that is waited for is futures of this object's, without tasks: the simulation's cost for a call is small, and
    none of it is taken for the controller's.
    """

    dies: type[ProcessDied] = ProcessDied

    def __init__(self, name: str, world: "World", hosts: Sequence[int]):
        self.name, self.world, self.hosts = name, world, tuple(hosts)
        self.loop: SimulatedLoop = world.loop
        self.is_dead = False
        self._waiting: set[asyncio.Future[Any]] = set()

    def die(self) -> None:
        """Whoever waits for it hears so once the death is noticed."""
        self.is_dead = True
        for future in [future for future in self._waiting if not future.done()]:
            future.set_result(None)

    def called(self, verb: str, work: Coroutine[Any, Any, Any]) -> "Spared":
        """Of a coroutine of this object's."""

        async def in_span() -> Any:
            with self.world.timeline.span(self.name, verb):
                return await work

        return Spared(self.loop, in_span())

    async def wait(self, *futures: asyncio.Future[Any]) -> None:
        """For all. Raises where a host is lost before."""
        try:
            for future in futures:
                if not self.is_dead:
                    self._waiting.add(future)
                    await future
        finally:
            self._waiting.difference_update(futures)
        if self.is_dead:
            await asyncio.sleep(self.world.machine.controls.detect)
            raise self.dies(f"{self.name}: its host is lost")

    async def use(self, *shares: tuple[Shared, float]) -> None:
        """All at once."""
        jobs = [(shared, shared.begin(amount)) for shared, amount in shares]
        try:
            await self.wait(*(future for _, future in jobs))
        finally:
            for shared, future in jobs:
                shared.give_up(future)

    async def sleep(self, seconds: float) -> None:
        future = self.loop.create_future()
        timer = self.loop.call_later(seconds, lambda: future.done() or future.set_result(None))
        try:
            await self.wait(future)
        finally:
            timer.cancel()

    async def message(self, size: int, host: int | None = None, to_controller: bool = False) -> None:
        """One way between the controller and a process. host: of several."""
        await self.messages([(self.hosts[0] if host is None else host, size)], to_controller)

    async def messages(self, sizes: Sequence[tuple[int, int]], to_controller: bool = False) -> None:
        """To, or from, processes on several hosts at once."""
        if shares := [share for host, size in sizes for share in self.world.sent(host, size, to_controller)]:
            await self.use(*shares)
        await self.sleep(self.world.machine.controls.latency / 2)

    async def check(self) -> None:
        await Spared(self.loop, self._check())

    async def _check(self) -> None:
        await self.message(ASK_BYTES)
        await self.message(ASK_BYTES, to_controller=True)

    async def kill(self) -> None:
        self.world.leaves(self)


class Generator(Remote):
    """Decodes all that it has together. An answer's length is drawn as the workload has it."""

    def __init__(self, name: str, world: "World", host: int, work: Work, config: VLLMConfig):
        super().__init__(name, world, (host,))
        self._work, self._version = work, 0
        self._steps = Shared(self.loop, lambda n: 1 / work.decode(n), config.max_num_seqs)

    @property
    def seconds_busy(self) -> float:
        return self._steps.busy

    async def suspend(self) -> None:
        raise AssertionError("turns are not simulated")

    async def give_up_samples(self, keys: Any = None) -> None:
        await Spared(self.loop, self._check())

    async def load_weights(self, manifest: Manifest) -> None:
        await self.called("load_weights", self._load(manifest))

    async def _load(self, manifest: Manifest) -> None:
        await self.message(ASK_BYTES)
        await self.world.fetch(self, manifest.version)
        self._steps.pause(self._work.load())
        await self.sleep(self._work.load())
        self._version = manifest.version
        await self.message(ASK_BYTES, to_controller=True)

    async def sample(
        self, prompt: Sequence[int], n: int, params: Any, wave: Any, key: int
    ) -> list[Completion]:
        answer = await self.called("sample", self._sample(prompt, n))
        return pickle.loads(answer)  # the controller's work, which a message's costs are without

    async def _sample(self, prompt: Sequence[int], n: int) -> bytes:
        lengths, first = self.world.lengths(n), self._version
        await self.message(ASK_BYTES + 8 * len(prompt))
        self._steps.pause(self._work.prefill(len(prompt) - self.world.shared_tokens))
        await self.use(*((self._steps, length) for length in lengths))
        versions = VersionRange(first, self._version)
        answer = pickle.dumps([self.world.completion(length, versions) for length in lengths])
        await self.message(len(answer), to_controller=True)
        return answer


class RewardWorker(Remote):
    """Half of a group's answers are right."""

    def __init__(self, name: str, world: "World", host: int):
        super().__init__(name, world, (host,))

    async def score(self, rollouts: Sequence[Any]) -> list[Score]:
        asked = len(pickle.dumps(rollouts))
        return await self.called("score", self._score(asked, len(rollouts)))

    async def _score(self, asked: int, count: int) -> list[Score]:
        await self.message(asked)
        await self.sleep(self.world.machine.overheads.reward)
        await self.message(ASK_BYTES, to_controller=True)
        return [Score(float(i % 2)) for i in range(count)]


class Trainer(Remote, TrainerHandle):
    """All ranks: the slowest decides, and each has what it is sent."""

    dies = EngineDied

    def __init__(
        self,
        world: "World",
        hosts: Sequence[int],
        work: Callable[[int], Work],
        config: EngineConfig,
        deadlines: Deadlines,
        timeline: Timeline,
    ):
        """hosts: of each rank. work: rank -> what it computes with."""
        Remote.__init__(self, "trainer", world, hosts)

        async def spawn() -> Any:
            raise AssertionError("it has no processes")

        TrainerHandle.__init__(self, "trainer", spawn, config, deadlines, timeline)
        self._work = work

    @property
    def hosts_of_weights(self) -> tuple[int, ...]:
        """Of the ranks that publish: those of the first copy of the model."""
        return self.hosts[: len(self.hosts) // self.config.layout.replicate]

    async def start(self) -> None:
        for host in {*self.hosts}:
            await self.world.back(host)
        await asyncio.sleep(self.world.machine.controls.start)
        self.is_dead = False
        self.world.comes(self)
        self._packing = packing(self.config, self.world.hf_config, self.config.share_prefixes)

    async def _ranks(self, method: str, args_of: Callable[[int], tuple], kind: str) -> list[Any]:
        async with self._turn:
            arguments = [args_of(rank) for rank in range(self.config.layout.num_procs)]
            sizes = [len(pickle.dumps(each)) for each in arguments]
            return await self.called(method, self._answers(method, arguments, sizes))

    async def _answers(self, method: str, arguments: list[tuple], sizes: list[int]) -> list[Any]:
        ranks = range(len(arguments))
        await self.messages([(self.hosts[rank], sizes[rank]) for rank in ranks])
        seconds = max(self._seconds(rank, method, arguments[rank]) for rank in ranks)
        num_rows = max(map(len, arguments[0][0].ranks)) if method in ("forward", "forward_backward") else 0
        await self.sleep(seconds + self.world.between_hosts(self, method, num_rows))
        await self.messages([(host, ASK_BYTES) for host in self.hosts], to_controller=True)
        return [self._answer(rank, method, arguments[rank]) for rank in ranks]

    def _seconds(self, rank: int, method: str, arguments: tuple) -> float:
        work = self._work(rank)
        if method in ("forward", "forward_backward"):
            learns = method == "forward_backward"
            rows = [row for rows in arguments[0].ranks for row in rows]
            return sum(
                work.train(len(row.tokens), len(row.targets), int(row.positions.sum()), learns)
                for row in rows
            )
        if method == "optim_step":
            return work.optim(self.config.layout.num_procs // self.config.layout.replicate)
        if method == "publish_weights":
            return work.publish(len(self.hosts_of_weights))
        return 0.0

    def _answer(self, rank: int, method: str, arguments: tuple) -> Any:
        if method == "forward_backward":
            names = ("loss:sum", "logprob_diff:sum", "logprob_diff:max", "ratio_outside:sum", "entropy:sum")
            return dict.fromkeys(names, 0.0) | {"tokens:sum": float(arguments[0].num_target_tokens)}
        if method == "optim_step":
            return {"grad_norm": 1.0}
        if method == "publish_weights":
            self.world.published(arguments[0], self.hosts_of_weights)
            return []
        if method == "save_checkpoint" and rank == 0:
            _save(Path(arguments[0]), arguments[1], arguments[2])
        if method == "load_checkpoint":
            return json.loads((Path(arguments[0]) / "record.json").read_text())["state"]
        return None


def _save(path: Path, state: dict[str, Any], keep_last: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    (path / "record.json").write_text(json.dumps({"state": state, "adapters": {}}))
    prune(path, keep_last)


def completion(
    rng: np.random.Generator, length: int, most: int, vocabulary: int, versions: VersionRange
) -> Completion:
    """Random tokens with random logprobs."""
    tokens = rng.integers(vocabulary // 4, vocabulary // 2, length, dtype=np.int32)
    logprobs = rng.random(length, dtype=np.float32) - 1
    stop = StopReason.LENGTH if length == most else StopReason.STOP
    return Completion(tokens, logprobs, versions, stop)
