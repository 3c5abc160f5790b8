"""RewardWorker: verifies rollouts away from the controller; and the pool that spreads groups over them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from rl.actors.remote import Caller, Deadline, ProcessDied, ProcessSilent, only
from rl.actors.replica import Pool, Replica
from rl.envs.base import Env
from rl.envs.verifier import START_SECONDS, Verifier
from rl.observability.timeline import Timeline
from rl.processes import kill_processes, process_info
from rl.types import ProcessInfo, Rollout, Score
from rl.waiting import Deadlines, Signal

_PING_SECONDS = 60.0


class RewardWorker(Actor):
    def __init__(self, env: Env, limit_seconds: float):
        self._verifier = Verifier(env, limit_seconds)

    @concurrent_endpoint
    async def ready(self) -> ProcessInfo:
        return process_info()

    @concurrent_endpoint
    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout. If a reward raises or exceeds the limit, its Score gives the cause."""
        return await asyncio.to_thread(self._verifier.score, rollouts)


class RewardProcess:
    """A running reward worker. See replica.Member."""

    def __init__(
        self, name: str, mesh: Any, actor: Any, limit_seconds: float, deadlines: Deadlines, timeline: Timeline
    ):
        self._mesh = mesh
        self._actor = actor
        self._limit = limit_seconds
        self._deadlines = deadlines
        self._timeline = timeline
        self._caller = Caller(name, f"logs/{name}.log of the run")

    async def ready(self) -> None:
        deadline = Deadline("start", self._deadlines.start)
        self._caller.processes = (
            await self._caller.call(only(self._actor.ready.call()), "start", deadline, past=ProcessSilent),
        )

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        # The worker limits each call of the reward function; past the limit its process is started again.
        seconds = len(rollouts) * (self._limit + START_SECONDS)
        with self._timeline.span(self._caller.name, "score"):
            call = only(self._actor.score.call(rollouts))
            return await self._caller.call(
                call, "score", Deadline("reward.limit_seconds", seconds), past=ProcessDied
            )

    async def check(self) -> None:
        deadline = Deadline("reward.limit_seconds", _PING_SECONDS)
        await self._caller.call(only(self._actor.ready.call()), "ready", deadline, past=ProcessDied)

    async def kill(self) -> None:
        await kill_processes(self._mesh, self._caller.processes)


class RewardPool(Pool[Replica[RewardProcess]]):
    """The workers as one; each verifies one group at a time."""

    def __init__(self, name: str, replicas: Sequence[Replica[RewardProcess]], changed: Signal):
        super().__init__(name, replicas, changed)
        # As many ask as there are workers; without it, each verdict would wake all groups that wait.
        self._turns = asyncio.Semaphore(len(replicas))

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        async with self._turns:
            return await self.ask(
                lambda replica: replica.ask(lambda process: process.score(rollouts)),
                takes=lambda replica: replica.load == 0,
            )
