"""Try a ChatEnv without a run: a policy that says what it is told to, the environment's code right here."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl.envs.base import RolloutContext, derive_seed
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import EndedEpisode, EpisodeRunner, Opening, Reply
from rl.envs.chat.loop import chat_template
from rl.envs.verifier import score_of
from rl.interfaces import Sampler, Tokenizer
from rl.sequences import joined
from rl.types import (
    Completion,
    Message,
    Problem,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    StopReason,
    VersionRange,
)
from rl.waiting import in_thread


@dataclass(frozen=True)
class Played:
    """`text`: all that the policy saw and said, special tokens included."""

    rollout: Rollout
    text: str

    @property
    def score(self) -> Score:
        assert self.rollout.score is not None
        return self.rollout.score


def play(
    env: ChatEnv, tokenizer: Tokenizer, says: Sequence[str], problem: Problem | None = None, seed: int = 0
) -> Played:
    """An episode in which the policy says these texts, one a turn, the last again and again.

    An AgentEnv's agent runs too: it finds the policy behind an endpoint, as in a run. What the environment's
    code raises is raised. Nothing is limited; no model is needed. Raises ValueError where `says` is empty.
    """
    if not says:
        raise ValueError(
            "play() has no texts for the policy; give at least one, as play(env, tokenizer, ['7'])"
        )
    problem = problem or env.train_problem(derive_seed(seed))
    sampler = CannedPolicy(tokenizer, says, chat_template(tokenizer, env.call_format).end_id)
    rollout = asyncio.run(_played(env, problem, sampler, tokenizer, seed))
    tokens = joined([segment.tokens for segment in rollout.segments]).tolist()
    return Played(rollout, tokenizer.decode_with_special(tokens))


async def _played(
    env: ChatEnv, problem: Problem, sampler: Sampler, tokenizer: Tokenizer, seed: int
) -> Rollout:
    from rl.envs.chat.endpoint import AgentEndpoint  # a web server, which nothing else here needs

    door = AgentEndpoint(tokenizer)
    params = SamplingParams(10**6, seed=seed)
    context = RolloutContext(sampler, tokenizer, params, 10**6, _Here(env), door)
    try:
        (rollout,) = await env.drive(Prompt(problem, ()), 1, context)
        return rollout
    finally:
        await door.close()


class CannedPolicy:
    """A Sampler that says texts, one a turn, the last again and again."""

    def __init__(self, tokenizer: Tokenizer, says: Sequence[str], end: int):
        """end: the token that ends a turn."""
        self._tokenizer = tokenizer
        self._texts = itertools.chain(says, itertools.repeat(says[-1]))
        self._end = end

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        tokens = [*self._tokenizer.encode_plain(next(self._texts)), self._end]
        logprobs = np.zeros(len(tokens), np.float32)
        return [Completion(np.array(tokens), logprobs, VersionRange(0, 0), StopReason.STOP)]


@dataclass(frozen=True)
class _Here:
    """Episodes in this process, in a thread: the environment may have an event loop of its own."""

    env: ChatEnv

    @asynccontextmanager
    async def open(self, problem: Problem, seed: int) -> AsyncIterator["_HereEpisode"]:
        yield _HereEpisode(EpisodeRunner(self.env, self.env.tools(), problem, seed))


@dataclass(frozen=True)
class _HereEpisode:
    runner: EpisodeRunner

    async def begin(self) -> Opening:
        return await in_thread(self.runner.begin)

    async def step(self, message: Message, malformed: Sequence[str], tokens: Sequence[int]) -> Reply:
        reply = await in_thread(self.runner.step, message, malformed, tokens)
        return replace(reply, score=await self.score()) if reply.done else reply

    async def act(self, base_url: str, api_key: str) -> None:
        await self.begin()
        await in_thread(self.runner.act, base_url, api_key)

    async def score(self, *end: Any) -> Score:
        score = score_of(await in_thread(self.runner.reward, *end))
        return replace(score, notes=dict(self.runner.episode.notes))

    async def score_group(self, members: Sequence[EndedEpisode]) -> list[Score]:
        return [score_of(r) for r in await in_thread(self.runner.reward_group, members)]
