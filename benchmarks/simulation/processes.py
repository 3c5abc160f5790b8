"""Processes that take the time of real ones: generators, reward workers, the trainer."""

import asyncio
import json
import pickle
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from benchmarks.simulation.clock import SimulatedLoop
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
from rl.waiting import Deadlines, beside
from rl.weight_sync.manifest import Manifest

if TYPE_CHECKING:
    from benchmarks.simulation.world import World

T = TypeVar("T")
ASK_BYTES = 500
"""Of a message with nothing of size in it."""


class _HostLost(Exception):
    """While something was asked of a process there."""


class Remote:
    """What processes on a host have in common: calls to them cost, and end where the host does."""

    dies: type[ProcessDied] = ProcessDied

    def __init__(self, name: str, world: "World", hosts: Sequence[int]):
        self.name, self.world, self.hosts = name, world, tuple(hosts)
        self.loop: SimulatedLoop = world.loop
        self.is_dead = asyncio.Event()

    async def check_host(self) -> None:
        if self.is_dead.is_set():
            await self._be_noticed()

    async def _be_noticed(self) -> NoReturn:
        await asyncio.sleep(self.world.machine.controls.detect)
        raise self.dies(f"{self.name}: its host is lost")

    async def while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns. Raises where the host is lost before."""

        async def until_dead() -> None:
            await self.is_dead.wait()
            raise _HostLost

        try:
            async with beside(until_dead()):
                return await work
        except _HostLost:
            await self._be_noticed()


class Generator(Remote):
    """Decodes all that it has together. An answer's length is drawn as the workload has it."""

    def __init__(self, name: str, world: "World", host: int, work: Work, config: VLLMConfig):
        super().__init__(name, world, (host,))
        self._work, self._version = work, 0
        self._steps = Shared(self.loop, lambda n: 1 / work.decode(n), config.max_num_seqs)

    @property
    def seconds_busy(self) -> float:
        return self._steps.busy

    async def check(self) -> None:
        await self.check_host()
        await self.world.call(self.hosts[0])

    async def kill(self) -> None:
        self.world.leaves(self)

    async def suspend(self) -> None:
        raise AssertionError("turns are not simulated")

    async def give_up_samples(self, keys: Any = None) -> None:
        await self.world.call(self.hosts[0])

    async def load_weights(self, manifest: Manifest) -> None:
        with self.world.timeline.span(self.name, "load_weights"):
            await self.while_alive(self._load(manifest))

    async def _load(self, manifest: Manifest) -> None:
        await self.world.call(self.hosts[0])
        await self.world.fetch(self.hosts[0], manifest.version)
        self._steps.pause(self._work.load())
        await asyncio.sleep(self._work.load())
        self._version = manifest.version

    async def sample(
        self, prompt: Sequence[int], n: int, params: Any, wave: Any, key: int
    ) -> list[Completion]:
        with self.world.timeline.span(self.name, "sample"):
            return await self.while_alive(self._sample(prompt, n))

    async def _sample(self, prompt: Sequence[int], n: int) -> list[Completion]:
        with self.loop.spare():
            lengths = self.world.lengths(n)
        first = self._version
        await self.world.message(self.hosts[0], ASK_BYTES + 8 * len(prompt))
        self._steps.pause(self._work.prefill(len(prompt) - self.world.shared_tokens))
        await asyncio.gather(*(self._steps.use(length) for length in lengths))
        with self.loop.spare():
            versions = VersionRange(first, self._version)
            answer = pickle.dumps([self.world.completion(length, versions) for length in lengths])
        await self.world.message(self.hosts[0], len(answer), to_controller=True)
        return pickle.loads(answer)


class RewardWorker(Remote):
    """Half of a group's answers are right."""

    def __init__(self, name: str, world: "World", host: int):
        super().__init__(name, world, (host,))

    async def check(self) -> None:
        await self.check_host()
        await self.world.call(self.hosts[0])

    async def kill(self) -> None:
        self.world.leaves(self)

    async def score(self, rollouts: Sequence[Any]) -> list[Score]:
        with self.world.timeline.span(self.name, "score"):
            return await self.while_alive(self._score(rollouts))

    async def _score(self, rollouts: Sequence[Any]) -> list[Score]:
        await self.world.message(self.hosts[0], len(pickle.dumps(rollouts)))
        await asyncio.sleep(self.world.machine.overheads.reward)
        await self.world.message(self.hosts[0], ASK_BYTES, to_controller=True)
        return [Score(float(i % 2)) for i in range(len(rollouts))]


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
        self._updates = 0

    async def start(self) -> None:
        await asyncio.gather(*(self.world.back(host) for host in {*self.hosts}))
        await asyncio.sleep(self.world.machine.controls.start)
        self.is_dead.clear()
        self.world.comes(self)
        self._packing = packing(self.config, self.world.hf_config, self.config.share_prefixes)

    async def kill(self) -> None:
        self.world.leaves(self)

    async def _ranks(self, method: str, args_of: Callable[[int], tuple], kind: str) -> list[Any]:
        async with self._turn:
            with self._timeline.span(self.name, method):
                return await self.while_alive(self._answers(method, args_of))

    async def _answers(self, method: str, args_of: Callable[[int], tuple]) -> list[Any]:
        ranks = range(self.config.layout.num_procs)
        arguments = [args_of(rank) for rank in ranks]
        sizes = [len(pickle.dumps(arguments[rank])) for rank in ranks]
        await asyncio.gather(*(self.world.message(self.hosts[rank], sizes[rank]) for rank in ranks))
        with self.loop.spare():
            seconds = max(self._seconds(rank, method, arguments[rank]) for rank in ranks)
            num_rows = max(map(len, arguments[0][0].ranks)) if method == "forward_backward" else 0
        await asyncio.sleep(seconds + self.world.between_hosts(self, method, num_rows))
        answers = (self.world.message(self.hosts[rank], ASK_BYTES, to_controller=True) for rank in ranks)
        await asyncio.gather(*answers)
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
            layout = self.config.layout
            return work.optim(layout.num_procs // layout.replicate)
        if method == "publish_weights":
            return work.publish(len(self.hosts))
        return 0.0

    def _answer(self, rank: int, method: str, arguments: tuple) -> Any:
        if method == "forward_backward":
            names = ("loss:sum", "logprob_diff:sum", "logprob_diff:max", "ratio_outside:sum", "entropy:sum")
            return dict.fromkeys(names, 0.0) | {"tokens:sum": float(arguments[0].num_target_tokens)}
        if method == "optim_step":
            self._updates += 1
            return {"grad_norm": 1.0}
        if method == "publish_weights":
            self.world.published(arguments[0], self.hosts)
            return []
        if method == "save_checkpoint" and rank == 0:
            self._save(Path(arguments[0]), arguments[1], arguments[2])
        if method == "load_checkpoint":
            return json.loads((Path(arguments[0]) / "record.json").read_text())["state"]
        return None

    def _save(self, path: Path, state: dict[str, Any], keep_last: int) -> None:
        with self.loop.spare():
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
