"""Rollouts of a step: problems drawn, answered by the generators, scored by the reward processes."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from rl.controller.config import RunConfig
from rl.controller.launch import Fleet
from rl.envs.base import derive_seed
from rl.errors import RunError
from rl.interfaces import Tokenizer
from rl.types import Group, Problem, SamplingParams


@dataclass(frozen=True)
class Sampling:
    """How the policy is sampled. Every seed follows from the run's, the step, the round and the prompt."""

    config: RunConfig
    fleet: Fleet
    tokenizer: Tokenizer

    async def collect(self, step: int) -> tuple[list[Group], list[Group], dict[str, float]]:
        """`prompts_per_step` groups to learn from, all that were sampled, and how many that took.

        Dynamic sampling: in each of `resampling_rounds` the groups without a signal make way for as many new prompts. Those
        without a signal that are left after the last round stay: they count in the mean and teach nothing.
        Raises RunError where not one reward of the prompts could be had: nothing can be learnt from such a task.
        """
        config = self.config
        groups = await self.rollout(self.problems(step, 0, config.prompts_per_step), derive_seed(config.seed, "sample", step))
        self.check_rewards(groups)
        sampled, rounds = list(groups), 0
        while rounds < config.resampling_rounds and (missing := sum(not g.has_signal for g in groups)):
            rounds += 1
            problems = self.problems(step, len(sampled), missing)
            sampled += await self.rollout(problems, derive_seed(config.seed, "sample", step, rounds))
            groups = sorted(sampled, key=attrgetter("has_signal"), reverse=True)[: config.prompts_per_step]
        counts = {"resampling/rounds": rounds, "resampling/extra_prompts": len(sampled) - config.prompts_per_step}
        return groups, sampled, counts if config.resampling_rounds else {}

    def problems(self, step: int, first: int, count: int) -> list[Problem]:
        seeds = (derive_seed(self.config.seed, "problem", step, i) for i in range(first, first + count))
        return [self.config.env.train_problem(seed) for seed in seeds]

    async def rollout(self, problems: Sequence[Problem], seed: int, *, greedy: bool = False) -> list[Group]:
        """A group for each problem: `group_size` samples of it, or one that is greedy."""
        return await asyncio.gather(*(self._group(problem, derive_seed(seed, i) % 2**32, greedy) for i, problem in enumerate(problems)))

    def check_rewards(self, groups: Sequence[Group]) -> None:
        """Raises RunError where every reward failed."""
        causes = [score.error for group in groups for score in group.scores]
        if all(causes) and self.config.reads_rewards:
            raise RunError(f"all {len(causes)} rewards failed, the first: {causes[0]}; see logs/reward-0.log of the run")

    async def _group(self, problem: Problem, seed: int, greedy: bool) -> Group:
        env, stop = self.config.env, (self.tokenizer.eos_id,)
        params = SamplingParams(env.max_new_tokens, 0.0 if greedy else 1.0, seed, stop, self.fleet.adapter)
        prompt = env.encode(problem, self.tokenizer)
        rollouts = await env.drive(prompt, 1 if greedy else self.config.group_size, params, self.fleet.generators, self.tokenizer)
        return Group(tuple(rollouts), tuple(await self.fleet.rewards.score(rollouts)))
