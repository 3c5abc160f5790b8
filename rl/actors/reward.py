"""RewardWorker: verifies rollouts away from the controller, and the pool that spreads groups over its replicas."""

import asyncio
from collections.abc import Sequence
from typing import Any

from monarch.actor import Actor, endpoint

from rl.actors.remote import Replicas
from rl.envs.base import Env
from rl.envs.verifier import Verifier
from rl.types import Rollout, Score


class RewardWorker(Actor):
    def __init__(self, env: Env, limit_seconds: float):
        self._verifier = Verifier(env, limit_seconds)

    @endpoint
    async def ready(self) -> bool:
        return True

    @endpoint
    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout. A reward that raises or outlasts the limit gets a Score with its cause."""
        return await asyncio.to_thread(self._verifier.score, rollouts)


class RewardPool:
    """The replicas as one."""

    def __init__(self, actors: Any, num_replicas: int, deadline_seconds: float):
        members = [actors.slice(procs=i) for i in range(num_replicas)]
        self._replicas = Replicas("reward", members, deadline_seconds, max_in_flight=1)

    async def ready(self) -> None:
        await self._replicas.ready()

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return await self._replicas.call(lambda r: r.score.call_one(rollouts), load=len(rollouts))
