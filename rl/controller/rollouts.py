"""Rollouts: the group of a prompt, answered by the generators and verified by the reward workers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rl.envs.base import Env, RolloutContext, derive_seed, held_out
from rl.errors import RunError, one_line
from rl.interfaces import Door, Episodes, Sampler, Tokenizer
from rl.types import Group, Prompt, Rollout, SamplingParams, Score


@dataclass(frozen=True)
class Rollouts:
    """How the policy is sampled. Problems and seeds follow from run seed and prompt index alone."""

    env: Env
    tokenizer: Tokenizer
    score: Callable[[Sequence[Rollout]], Awaitable[list[Score]]]
    group_size: int
    seed: int
    max_tokens: int  # longest sequence
    adapter: str | None = None  # the policy, where it is one
    episodes: Episodes | None = None  # where a ChatEnv's code runs
    door: Door | None = None  # where an AgentEnv's agents find the policy
    _prepared: "_Prepared" = field(default_factory=lambda: _Prepared())

    async def train_group(self, index: int, sampler: Sampler) -> Group:
        """`group_size` samples of the prompt with this index."""
        prompt = self._prepared.take(index) or self._train_prompt(index)
        seed = derive_seed(self.seed, "sample", index) % 2**32
        return await self._group(index, prompt, sampler, self.group_size, 1.0, seed)

    async def prepare(self, indices: Iterable[int]) -> None:
        """Make the next prompts while the processes are busy, so that none of them waits for it later.

        One that the environment cannot make is left: that is raised when its turn comes, between two steps.
        """
        for index in indices:
            if self._prepared.is_wanted(index):
                with suppress(Exception):
                    self._prepared.put(index, self._train_prompt(index))
            await asyncio.sleep(0)

    def _train_prompt(self, index: int) -> Prompt:
        """Raises RunError where the environment raises: its data may have changed since the run began."""
        try:
            problem = self.env.train_problem(derive_seed(self.seed, "problem", index))
            return self.env.encode(problem, self.tokenizer)
        except Exception as error:
            name = type(self.env).__name__
            raise RunError(f"env {name} makes no problem of prompt {index}: {one_line(error)}") from error

    async def evaluate(self, sampler: Sampler, size: int = 1, temperature: float = 0.0) -> list[Group]:
        """A greedy answer to each held-out problem; or `size` samples."""
        prompts = [self.env.encode(problem, self.tokenizer) for problem in held_out(self.env)]
        seeds = [derive_seed(self.seed, "eval", i) % 2**32 for i in range(len(prompts))]
        groups = (
            self._group(i, prompt, sampler, size, temperature, seed)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        )
        return await asyncio.gather(*groups)

    async def close(self) -> None:
        if self.door is not None:
            await self.door.close()

    async def _group(
        self, index: int, prompt: Prompt, sampler: Sampler, size: int, temperature: float, seed: int
    ) -> Group:
        ends = self.env.stop_ids(prompt.problem, self.tokenizer)
        stop = tuple(dict.fromkeys((self.tokenizer.eos_id, *ends)))
        params = SamplingParams(self.env.max_new_tokens, temperature, seed, stop, self.adapter)
        context = RolloutContext(sampler, self.tokenizer, params, self.max_tokens, self.episodes, self.door)
        rollouts = await self.env.drive(prompt, size, context)
        unscored = [rollout for rollout in rollouts if rollout.score is None]
        scores = iter(await self.score(unscored) if unscored else ())
        return Group(index, tuple(rollouts), tuple(r.score or next(scores) for r in rollouts))


class _Prepared:
    """Prompts that were made before their turn, all of indices over every one that has started."""

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}
        self._newest_started = -1

    def is_wanted(self, index: int) -> bool:
        return index > self._newest_started

    def put(self, index: int, prompt: Prompt) -> None:
        self._prompts[index] = prompt

    def take(self, index: int) -> Prompt | None:
        """The index starts: its prompt, if it was made."""
        prompt = self._prompts.pop(index, None)
        self._newest_started = max(self._newest_started, index)
        for passed in [i for i in self._prompts if i < self._newest_started]:
            del self._prompts[passed]
        return prompt


def check_rewards(
    groups: Sequence[Group],
    has_trained: bool = False,
    record: Callable[[Sequence[Group]], None] = lambda groups: None,
    reads_rewards: bool = True,
) -> None:
    """Raises RunError where every reward failed: nothing can be learnt from such a task. Where nothing reads
    rewards, where nothing was sampled.

    has_trained: the task has given rewards before, so that a failure that the policy can bring about is the
    policy's, and does not end the run. record: writes the groups into rollouts.jsonl, which the error names.
    """
    scores = [score for group in groups for score in group.scores]
    if not reads_rewards:
        have_failed = not any(group.was_sampled for group in groups)
    else:
        have_failed = all(score.is_dropped if has_trained else score.error for score in scores)
    if have_failed:
        record(groups)
        raise RunError(
            f"all {len(scores)} rewards failed, the first: {scores[0].error}; see logs/reward-0.log of the "
            f"run, and its rollouts.jsonl"
        )
