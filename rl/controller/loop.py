"""The synchronous GRPO loop: sample, score, assign credit, learn, publish; again.

What is left out of GRPO, as in most of today's recipes: the KL term to a reference policy.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rl.batching import pack, supervised_sample, to_sample
from rl.controller.config import RunConfig
from rl.controller.launch import Fleet
from rl.envs.base import derive_seed
from rl.errors import RunError
from rl.interfaces import Credit, Tokenizer
from rl.loss.policy import CrossEntropy
from rl.observability.metrics import eval_metrics, step_metrics
from rl.observability.recorder import Recorder
from rl.types import Batch, Group, OptimParams, Problem, Sample, SamplingParams


@dataclass(frozen=True)
class Run:
    """A run: its settings, its actors, and where it reports."""

    config: RunConfig
    fleet: Fleet
    tokenizer: Tokenizer
    recorder: Recorder

    async def train(self, first_step: int) -> None:
        """Steps `first_step` to `config.steps`, with the policy before them evaluated as step first_step - 1."""
        config, trainer = self.config, self.fleet.trainer
        if first_step == 1:
            await self.warm_up()
        await self.fleet.publish(first_step - 1)
        await self.evaluate(first_step - 1)
        for step in range(first_step, config.steps + 1):
            with self.recorder.time("generate"):
                groups = await self.rollout(self.train_problems(step), derive_seed(config.seed, "sample", step))
            samples, num_tokens = assign_credit(groups, config.credit)
            batch = self.pack(samples)
            with self.recorder.time("train"):
                learned = await trainer.forward_backward(batch, config.loss)
                stepped = await trainer.optim_step(self.optim_params(step, num_tokens))
            with self.recorder.time("sync"):
                await self.fleet.publish(step)
            alive = {"generators/alive": self.fleet.generators.num_alive}
            self.recorder.step(step, step_metrics(groups, batch, learned, num_tokens) | stepped | alive, groups)
            if step % config.eval_every == 0 or step == config.steps:
                await self.evaluate(step)
            if step == config.steps or (config.save_every and step % config.save_every == 0):
                await trainer.save_checkpoint(str(self.recorder.checkpoint_path(step)), {"step": step}, config.keep_checkpoints)
        await trainer.finish_checkpoint()

    async def rollout(self, problems: Sequence[Problem], seed: int, *, greedy: bool = False) -> list[Group]:
        """A group for each problem: `group_size` samples of it, or one that is greedy.

        Raises RunError where not one reward could be had: nothing can be learnt from such a task.
        """
        groups = await asyncio.gather(*(self._group(problem, derive_seed(seed, i) % 2**32, greedy) for i, problem in enumerate(problems)))
        causes = [score.error for group in groups for score in group.scores]
        if all(causes):
            raise RunError(f"all {len(causes)} rewards failed, the first: {causes[0]}; see logs/reward-0.log of the run")
        return groups

    async def _group(self, problem: Problem, seed: int, greedy: bool) -> Group:
        env, stop = self.config.env, (self.tokenizer.eos_id,)
        params = SamplingParams(env.max_new_tokens, 0.0 if greedy else 1.0, seed, stop, self.fleet.adapter)
        prompt = env.encode(problem, self.tokenizer)
        rollouts = await env.drive(prompt, 1 if greedy else self.config.group_size, params, self.fleet.generators, self.tokenizer)
        return Group(tuple(rollouts), tuple(await self.fleet.rewards.score(rollouts)))

    async def evaluate(self, step: int) -> None:
        """Greedy accuracy on the held-out problems."""
        with self.recorder.time("eval"):
            groups = await self.rollout(self.config.env.eval_problems(), 0, greedy=True)
        self.recorder.evaluation(step, eval_metrics(groups), groups)

    async def warm_up(self) -> None:
        """Supervised steps on the environment's demonstrations; the optimizer that RL then gets is a fresh one."""
        warmup, env = self.config.warmup, self.config.env
        for step in range(1, warmup.steps + 1):
            seeds = [derive_seed(self.config.seed, "warmup", step, i) for i in range(warmup.batch_size)]
            samples = [self._demonstration(env.train_problem(seed), seed) for seed in seeds]
            batch = self.pack(samples)
            learned = await self.fleet.trainer.forward_backward(batch, CrossEntropy())
            await self.fleet.trainer.optim_step(OptimParams(warmup.lr, 1 / batch.num_scored_tokens))
            self.recorder.warmup(step, warmup.steps, learned["loss:sum"] / batch.num_scored_tokens)
        if warmup.steps:
            await self.fleet.trainer.reset_optimizer()

    def _demonstration(self, problem: Problem, seed: int) -> Sample:
        target = self.tokenizer.encode_plain(self.config.env.demonstration(problem, seed))
        return supervised_sample(self.config.env.encode(problem, self.tokenizer).tokens, [*target, self.tokenizer.eos_id])

    def train_problems(self, step: int) -> list[Problem]:
        seeds = (derive_seed(self.config.seed, "problem", step, i) for i in range(self.config.prompts_per_step))
        return [self.config.env.train_problem(seed) for seed in seeds]

    def pack(self, samples: Sequence[Sample]) -> Batch:
        trainer = self.config.trainer
        return pack(
            samples,
            num_ranks=trainer.layout.data_parallel,
            max_tokens=trainer.max_tokens,
            multiple_of=trainer.row_multiple,
        )

    def optim_params(self, step: int, num_tokens: int) -> OptimParams:
        """The learning rate's schedule, and the mean over all sampled tokens."""
        trainer = self.config.trainer
        lr = trainer.lr * min(1.0, step / max(1, trainer.lr_warmup_steps))
        return OptimParams(lr, 1 / num_tokens, trainer.betas, trainer.eps, trainer.weight_decay, trainer.max_grad_norm)


def assign_credit(groups: Sequence[Group], credit: Credit) -> tuple[list[Sample], int]:
    """The samples that carry a gradient, and the number of sampled tokens of all that were scored.

    A rollout whose reward failed is left out. Samples with advantage 0 add nothing to the gradient and are not trained
    on, but for one group where no group has a signal: parity with the generator is measured on every step.
    """
    samples: list[list[Sample]] = []
    for group in groups:
        scored = [(r, s.reward) for r, s in zip(group.rollouts, group.scores, strict=True) if s.error is None]
        advantages = credit([reward for _, reward in scored]) if scored else []
        samples.append([to_sample(r, a) for (r, _), a in zip(scored, advantages, strict=True)])
    everything = [sample for group in samples for sample in group]
    num_tokens = max(1, sum(int(s.loss_mask.sum()) for s in everything))
    with_signal = [s for s in everything if s.advantages.any()]
    return with_signal or next((group for group in samples if group), []), num_tokens
