"""Rollouts: the group of a prompt, answered by the generators and verified by the reward workers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rl.envs.base import Env, derive_seed
from rl.errors import RunError
from rl.interfaces import Sampler, Tokenizer
from rl.types import Group, Problem, Rollout, SamplingParams, Score


@dataclass(frozen=True)
class Rollouts:
    """How the policy is sampled. Problems and seeds follow from the run's seed and the prompt's index, and nothing else."""

    env: Env
    tokenizer: Tokenizer
    score: Callable[[Sequence[Rollout]], Awaitable[list[Score]]]
    group_size: int
    seed: int
    adapter: str | None = None  # the policy, where it is one

    async def train_group(self, index: int, sampler: Sampler) -> Group:
        """`group_size` samples of the prompt with this index."""
        problem = self.env.train_problem(derive_seed(self.seed, "problem", index))
        seed = derive_seed(self.seed, "sample", index) % 2**32
        return await self._group(index, problem, sampler, self.group_size, 1.0, seed)

    async def evaluate(self, sampler: Sampler) -> list[Group]:
        """A greedy answer to each held-out problem."""
        problems = self.env.eval_problems()
        groups = (self._group(i, problem, sampler, 1, 0.0, 0) for i, problem in enumerate(problems))
        return await asyncio.gather(*groups)

    async def _group(
        self, index: int, problem: Problem, sampler: Sampler, size: int, temperature: float, seed: int
    ) -> Group:
        prompt = self.env.encode(problem, self.tokenizer)
        stop = (self.tokenizer.eos_id,)
        params = SamplingParams(self.env.max_new_tokens, temperature, seed, stop, self.adapter)
        rollouts = await self.env.drive(prompt, size, params, sampler, self.tokenizer)
        return Group(index, tuple(rollouts), tuple(await self.score(rollouts)))


def check_rewards(groups: Sequence[Group]) -> None:
    """Raises RunError where every reward failed: nothing can be learnt from such a task."""
    causes = [score.error for group in groups for score in group.scores]
    if all(causes):
        raise RunError(
            f"all {len(causes)} rewards failed, the first: {causes[0]}; see logs/reward-0.log of the run"
        )
