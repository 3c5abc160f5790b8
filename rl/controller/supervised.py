"""Supervised learning on what an environment knows: demonstrations, preferences, and the warm-up before RL."""

from dataclasses import dataclass

from rl.batching import supervised_sample
from rl.controller.config import RunConfig
from rl.controller.experience import Experience, Unit, weighted, with_scorers
from rl.controller.launch import Fleet
from rl.envs.base import derive_seed
from rl.errors import NotFinite, RunError
from rl.interfaces import Tokenizer
from rl.loss.cross_entropy import CrossEntropy
from rl.observability.recorder import Recorder
from rl.types import OptimParams, Problem, Sample


@dataclass(frozen=True)
class Lessons:
    """Where supervised samples come from. Every one follows from the run's seed, the step and its place."""

    config: RunConfig
    fleet: Fleet
    tokenizer: Tokenizer

    async def collect(self, step: int) -> Experience:
        """`prompts_per_step` demonstrations, or as many pairs, the chosen before the rejected."""
        seeds = [derive_seed(self.config.seed, self.config.data, step, i) for i in range(self.config.prompts_per_step)]
        pairs = self.config.data == "preferences"
        units = [self.pair(seed) if pairs else weighted([self.demonstration(seed)], self.config) for seed in seeds]
        reference = self.fleet.reference
        units = await with_scorers(units, {"ref_logprobs": reference.scores} if reference else {})
        return Experience([_unit(unit) for unit in units], samples_per_unit=2 if pairs else 1)

    def demonstration(self, seed: int) -> Sample:
        problem = self.config.env.train_problem(seed)
        return self._sample(problem, self.config.env.demonstration(problem, seed), "demonstration")

    def pair(self, seed: int) -> list[Sample]:
        problem = self.config.env.train_problem(seed)
        chosen, rejected = self.config.env.preference(problem, seed)
        return [self._sample(problem, chosen, "chosen"), self._sample(problem, rejected, "rejected")]

    def _sample(self, problem: Problem, text: str, what: str) -> Sample:
        target = [*self.tokenizer.encode_plain(text), self.tokenizer.eos_id]
        return supervised_sample(self.config.env.encode(problem, self.tokenizer).tokens, target, f"{problem.id}, {what}")

    async def warm_up(self, recorder: Recorder) -> None:
        """Supervised steps on demonstrations; the optimizer that is left behind is a fresh one."""
        warmup, trainer = self.config.warmup, self.fleet.trainer
        for step in range(1, warmup.steps + 1):
            seeds = [derive_seed(self.config.seed, "warmup", step, i) for i in range(warmup.batch_size)]
            batch = trainer.pack([self.demonstration(seed) for seed in seeds])
            try:
                learned = await trainer.forward_backward(batch, CrossEntropy())
                await trainer.optim_step(OptimParams(warmup.lr, 1 / batch.num_target_tokens))
            except NotFinite as error:
                raise RunError(f"warm-up step {step}: {error}; lower warmup.lr={warmup.lr}") from error
            recorder.warmup(step, warmup.steps, learned["loss:sum"] / batch.num_target_tokens)
        if warmup.steps:
            await trainer.reset_optimizer()


def _unit(samples: list[Sample]) -> Unit:
    return Unit(samples, sum(int(s.target_mask.sum()) for s in samples), len(samples))
