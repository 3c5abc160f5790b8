"""Actors without processes, for benchmarks of the controller alone: everything takes as long as it is told, and no CPU."""

import asyncio
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from configs.quickstart import quickstart
from rl.actors.actors import Actors
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica
from rl.actors.replica import Replica
from rl.actors.reward import RewardPool
from rl.actors.trainer import TrainerHandle
from rl.config import RunConfig, WarmupConfig
from rl.config.settle import settle
from rl.observability.timeline import Timeline
from rl.observability.writer import Writer
from rl.plan.cluster import Cluster, Host
from rl.types import Completion, Score, StopReason, VersionRange
from rl.waiting import Signal
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore

_HOST = Cluster((Host(num_cores=1024, free_gib=65_536.0),))  # no process starts on it


@dataclass(frozen=True)
class Seconds:
    """How long each part takes."""

    group: float = 0.0  # a group's samples; drawn from a log-normal distribution around it
    spread: float = 0.0  # sigma of that
    reward: float = 0.0  # of a group
    train: float = 0.0  # forward_backward of a step
    publish: float = 0.0
    load: float = 0.0


class Completions:
    """Random tokens, as they come out of a message from another process."""

    def __init__(self, num_tokens: int):
        self._rng, self._num_tokens = np.random.default_rng(0), num_tokens

    def __call__(self, versions: VersionRange) -> Completion:
        tokens = self._rng.integers(5, 25, self._num_tokens, dtype=np.int32)
        logprobs = self._rng.random(self._num_tokens, dtype=np.float32) - 1
        return pickle.loads(pickle.dumps(Completion(tokens, logprobs, versions, StopReason.STOP)))

    async def sample(self, prompt: Any, n: int, params: Any) -> list[Completion]:
        return [self(VersionRange(0, 0)) for _ in range(n)]


class AtOnce(Writer):
    """Writes in its caller's thread: a virtual clock runs on while another thread is at work."""

    def _work(self) -> None:
        pass

    def _append(self, job: Callable[[], object], size: int) -> None:
        try:
            job()
        except Exception as error:
            self._error = self._error or error


class FakeGenerator:
    def __init__(
        self,
        seconds: Seconds,
        rng: random.Random,
        complete: Callable[[VersionRange], Completion],
    ):
        self._seconds, self._rng, self._version, self._complete = seconds, rng, 0, complete

    async def check(self) -> None:
        pass

    async def kill(self) -> None:
        pass

    async def load_weights(self, manifest: Manifest) -> None:
        await asyncio.sleep(self._seconds.load)
        self._version = manifest.version

    async def sample(self, prompt: Any, n: int, params: Any, wave: Any, key: int) -> list[Completion]:
        first = self._version
        await asyncio.sleep(self._seconds.group * self._rng.lognormvariate(0, self._seconds.spread))
        versions = VersionRange(first, self._version)
        return [self._complete(versions) for _ in range(n)]


class FakeReward:
    def __init__(self, seconds: Seconds):
        self._seconds = seconds

    async def check(self) -> None:
        pass

    async def kill(self) -> None:
        pass

    async def score(self, rollouts: Any) -> list[Score]:
        await asyncio.sleep(self._seconds.reward)
        return [Score(float(i % 2)) for i in range(len(rollouts))]


class FakeTrainer(TrainerHandle):
    """Packs as the real one does, so that the controller's part is all there."""

    def __init__(self, config: RunConfig, seconds: Seconds):
        spec = settle(config, cluster=_HOST).of("trainer")[0].spec
        super().__init__("trainer", None, spec.config, config.deadlines, Timeline())
        self._seconds = seconds

    async def _every(self, method: str, *args: Any, kind: str = "train") -> list[Any]:
        if method == "publish_weights":
            await asyncio.sleep(self._seconds.publish)
            return [[]]
        return [{"grad_norm": 1.0}] if method == "optim_step" else [None]

    async def _data_parallel(self, method: str, batch: Any, *args: Any) -> list[Any]:
        await asyncio.sleep(self._seconds.train)
        names = ("loss:sum", "logprob_diff:sum", "logprob_diff:max", "ratio_outside:sum", "entropy:sum")
        return [dict.fromkeys(names, 0.0) | {"tokens:sum": float(batch.num_target_tokens)}]


def config(**changes: Any) -> RunConfig:
    base = quickstart()
    return replace(
        base, warmup=WarmupConfig(), env=replace(base.env, num_eval=1), eval_every=10**9, **changes
    )


def fake_actors(
    config: RunConfig,
    seconds: Seconds,
    num_rewards: int,
    complete: Callable[[VersionRange], Completion],
    seed: int = 0,
    reward: FakeReward | None = None,
    trainer: FakeTrainer | None = None,
) -> Actors:
    """The controller's own pools, replicas and store over processes that are made up."""
    rng = random.Random(seed)

    async def released(manifest: Manifest) -> None:
        pass

    store, rewards_changed = WeightStore(released), Signal()

    def make(number: int, updates: Any, changed: Signal) -> GeneratorReplica:
        async def spawn() -> FakeGenerator:
            return FakeGenerator(seconds, rng, complete)

        return GeneratorReplica(f"generator-{number}", spawn, 0, "in_flight", updates, changed)

    async def spawn_reward() -> FakeReward:
        return reward or FakeReward(seconds)

    rewards = [Replica(f"reward-{i}", spawn_reward, 0, rewards_changed) for i in range(num_rewards)]
    generators = GeneratorPool("generator", make, config.generator.num_replicas, MODEL, store)
    pool = RewardPool("reward worker", rewards, rewards_changed, max_episodes=0)
    return Actors(trainer or FakeTrainer(config, seconds), generators, pool, store, config.deadlines)
