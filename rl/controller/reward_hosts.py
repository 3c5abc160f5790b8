"""The environment on each host that rewards, compared with how it went where the run was started."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rl.actors.actors import Actors
from rl.actors.remote import ProcessDied
from rl.actors.replica import Replica, State
from rl.actors.reward import RemoteEpisode, RewardPool, RewardProcess
from rl.config.learning import Learning
from rl.config.rehearsal import Take, canned_rollout
from rl.envs.chat.agent import door_for
from rl.envs.chat.env import ChatEnv
from rl.errors import RunError
from rl.fields import shown
from rl.interfaces import Door, Tokenizer
from rl.plan.fit import host_name
from rl.plan.types import Plan
from rl.types import Problem, Rollout, Score
from rl.waiting import together

_PAUSES = (2.0, 10.0)
"""Seconds before an answer that failed is tried again."""


class _OneWorker:
    """A worker of a pool, for what is asked of that one alone. See interfaces.Episodes."""

    def __init__(self, pool: RewardPool, replica: Replica[RewardProcess]):
        self._pool = pool
        self._replica = replica

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """As RewardWorker.score. Raises ProcessDied where it has died."""
        await self._serving()
        return await self._replica.ask(lambda process: process.score(rollouts))

    @asynccontextmanager
    async def open(self, problem: Problem, seed: int) -> AsyncIterator[RemoteEpisode]:
        """Raises ProcessDied where it has died."""
        await self._serving()
        episode = RemoteEpisode(self._replica, problem, seed)
        try:
            yield episode
        finally:
            await asyncio.shield(episode.close())

    async def _serving(self) -> None:
        replica = self._replica
        await self._pool.changed.wait_for(
            lambda: replica.takes_work or replica.num_restarts > 0 or replica.state is State.DEAD
        )
        if not replica.takes_work:
            raise ProcessDied(f"{replica.name} has died")


async def try_reward_hosts(
    takes: Sequence[Take], learning: Learning, plan: Plan, actors: Actors, tokenizer: Tokenizer
) -> None:
    """One worker of each host rewards the answers that were rewarded without an error before the start.

    Raises RunError where one fails there, again and again: the host lacks a file, a package or a service, and
    each of its rewards would be 0. A worker that dies meanwhile is not asked: others may have its work.
    """
    worked = [take for take in takes if not take.score.error]
    by_host = {r.processes[0].host: r.name for r in reversed(plan.of("reward"))}
    if not any(host.address for host in plan.cluster.hosts) or not worked:
        return
    door = door_for(learning.env, tokenizer, actors.address)
    workers = {replica.name: replica for replica in actors.rewards.replicas}

    async def try_host(host: int, name: str) -> None:
        worker = _OneWorker(actors.rewards, workers[name])
        for take in worked:
            try:
                score = await _score_at_last(take, learning, worker, door, tokenizer)
            except ProcessDied:
                return
            if score.error:
                where = host_name(host, plan.cluster)
                raise RunError(
                    f"{name} on {where} fails where the policy answers {shown(take.texts[-1])}, and the host "
                    f"where the run was started did not: {score.error:.300}; install there what env "
                    f"{type(learning.env).__name__} needs, or leave it out of --reward.hosts"
                )

    try:
        await together(try_host(host, name) for host, name in by_host.items())
    finally:
        if door is not None:
            await door.close()


async def _score_at_last(
    take: Take, learning: Learning, worker: _OneWorker, door: Door | None, tokenizer: Tokenizer
) -> Score:
    """Of a service that is away for some seconds, or a first call that is slow, the later one. Raises
    ProcessDied."""
    for seconds in (*_PAUSES, 0.0):
        score = await _score(take, learning, worker, door, tokenizer)
        if score.cause == "lost":
            raise ProcessDied(str(score.error))
        if not score.error:
            break
        await asyncio.sleep(seconds)
    return score


async def _score(
    take: Take, learning: Learning, worker: _OneWorker, door: Door | None, tokenizer: Tokenizer
) -> Score:
    """Raises ProcessDied where the worker has died."""
    env, problem = learning.env, take.rollout.problem
    if not isinstance(env, ChatEnv):
        return (await worker.score([take.rollout]))[0]
    rollout = await canned_rollout(env, problem, take.texts, tokenizer, learning.max_seq_len, worker, door)
    assert rollout.score is not None  # a ChatEnv's episodes score themselves
    return rollout.score
