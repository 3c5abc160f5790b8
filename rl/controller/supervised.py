"""Supervised learning on what an environment knows: demonstrations, preferences, the warm-up before RL."""

from collections.abc import Callable
from dataclasses import dataclass

from rl.actors.engine import EngineHandle
from rl.config.algorithm import Algorithm
from rl.controller.training_batch import Scorers, TrainingBatch, TrainingGroup, weighted, with_loss_inputs
from rl.envs.base import Env, derive_seed
from rl.envs.chat.demonstration import chat_sample, taught_answer
from rl.envs.chat.env import ChatEnv
from rl.errors import NotFinite, RunError
from rl.interfaces import Tokenizer
from rl.loss.cross_entropy import CrossEntropy
from rl.types import OptimParams, Problem, Sample


@dataclass(frozen=True)
class SupervisedData:
    """Where supervised samples come from. Each follows from the run's seed and its index."""

    env: Env
    tokenizer: Tokenizer
    seed: int

    async def batch(self, step: int, size: int, algorithm: Algorithm, scorers: Scorers) -> TrainingBatch:
        """`size` demonstrations, or as many pairs, the chosen before the rejected."""
        indices = range((step - 1) * size, step * size)
        seeds = [derive_seed(self.seed, algorithm.data, index) for index in indices]
        if algorithm.data == "preferences":
            units = [self.pair(seed) for seed in seeds]
        else:
            units = [list(weighted([self.demonstration(seed)], algorithm)) for seed in seeds]
        full = iter(await with_loss_inputs([sample for unit in units for sample in unit], scorers))
        groups = [_training_group([next(full) for _ in unit]) for unit in units]
        return TrainingBatch(groups, samples_per_unit=len(units[0]))

    def demonstration(self, seed: int) -> Sample:
        problem = self.env.train_problem(seed)
        if isinstance(self.env, ChatEnv):
            return chat_sample(self.env, problem, seed, self.tokenizer)
        return self._sample(problem, self.env.demonstration(problem, seed), "demonstration")

    def pair(self, seed: int) -> list[Sample]:
        problem = self.env.train_problem(seed)
        chosen, rejected = self.env.preference(problem, seed)
        return [self._sample(problem, chosen, "chosen"), self._sample(problem, rejected, "rejected")]

    def _sample(self, problem: Problem, text: str, kind: str) -> Sample:
        return taught_answer(self.env, problem, text, self.tokenizer, kind)


def _training_group(samples: list[Sample]) -> TrainingGroup:
    return TrainingGroup(samples, sum(s.num_targets for s in samples), len(samples))


async def warm_up(
    data: SupervisedData,
    trainer: EngineHandle,
    adapter: str | None,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    report: Callable[[int, float], None],
) -> None:
    """Supervised steps on demonstrations; leaves a fresh optimizer behind. report(step, loss)."""
    for step in range(1, steps + 1):
        seeds = [derive_seed(data.seed, "warmup", step, i) for i in range(batch_size)]
        batch = await trainer.pack([data.demonstration(seed) for seed in seeds])
        try:
            learned = await trainer.forward_backward(batch, CrossEntropy(), adapter)
            await trainer.optim_step(OptimParams(lr, 1 / batch.num_target_tokens), adapter)
        except NotFinite as error:
            raise RunError(f"warm-up step {step}: {error}; lower warmup.lr={lr}") from error
        report(step, learned["loss:sum"] / batch.num_target_tokens)
    if steps:
        await trainer.reset_optimizer(adapter)
