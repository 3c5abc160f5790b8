"""SmolLM2-135M-Instruct, real pretrained weights, learns to add and subtract on two CPU cores."""

from dataclasses import dataclass

from rl.config import GeneratorConfig, RunConfig, TrainerConfig, WarmupConfig
from rl.envs.reasoning import ReasoningGym
from rl.loss.entropy import EntropyBonus
from rl.models.sources import ModelDir
from rl.types import Problem

_ASKED = "State the final answer to the following arithmetic problem: "


def work_out(problem: str) -> str:
    """What follows `85 - 37 =`: ` 55 - 7 = 48`. The tens first, and the smaller from the larger."""
    first, sign, second = problem.split()
    a, b = int(first), int(second)
    if sign == "+":
        return f" {a + b}"
    larger, smaller = max(a, b), min(a, b)
    step = f"{larger - smaller // 10 * 10} - {smaller % 10}"
    if a < b:
        return f" -({step}) = {a - b}"
    return f" {step} = {a - b}" if smaller >= 10 else f" {a - b}"


@dataclass(frozen=True)
class ChainSum(ReasoningGym):
    """chain_sum of two terms, with demonstrations that work a difference out."""

    def demonstration(self, problem: Problem, seed: int) -> str:
        return work_out(problem.question.removeprefix(_ASKED).removesuffix("="))


_PROBLEMS = ("23 - 58", "71 + 46", "85 - 37", "4 - 62", "94 - 9", "38 + 7")
_EXAMPLES = "".join(f"{_ASKED}{problem} ={work_out(problem)}\n" for problem in _PROBLEMS)
"""Computed once for all samples of all prompts: by the generator's cache, and in a tree by the trainer."""


def smollm2() -> RunConfig:
    """640 worked demonstrations, then GRPO, on sums and differences of one or two digits.

    `rl fetch smollm2` makes the model directory. What was tried, and why these settings: docs/smollm2.md.
    """
    return RunConfig(
        model=ModelDir("models/smollm2-135m-instruct"),
        env=ChainSum(
            dataset="chain_sum",
            options=(("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 2)),
            prompt_prefix=_EXAMPLES,
            stop=("\n",),
            chat=False,
            max_new_tokens=20,
            partial_credit="distance",
            num_eval=256,
        ),
        warmup=WarmupConfig(steps=20, batch_size=32, lr=5e-5),
        trainer=TrainerConfig(
            lr=2e-5, lr_warmup_steps=3, lr_schedule="linear", lr_min_ratio=0.1, micro_batch_tokens=2048
        ),
        max_seq_len=2048,
        entropy=EntropyBonus(coef=0.05, target=0.3, adapt=0.01),
        generator=GeneratorConfig(kv_cache_gib=1.0, max_num_seqs=128),
        dtype="fastest",
        steps=32,
        prompts_per_step=32,
        group_size=8,
        minibatches=2,
        resampling_rounds=1,
        eval_every=10,
    )
