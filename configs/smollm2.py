"""SmolLM2-135M-Instruct, real pretrained weights, learns to add and subtract on two CPU cores."""

from rl.controller.config import GeneratorConfig, RunConfig, TrainerConfig
from rl.envs.reasoning import ReasoningGym
from rl.loss.entropy import EntropyBonus
from rl.models.sources import ModelDir

_ASKED = "State the final answer to the following arithmetic problem: "
_WORKED = (
    "23 - 58 = -(58 - 23) = -35",
    "71 + 46 = 117",
    "85 - 37 = 48",
    "4 - 62 = -(62 - 4) = -58",
    "94 - 9 = 85",
    "38 + 7 = 45",
)
_EXAMPLES = "".join(f"{_ASKED}{example}\n" for example in _WORKED)
"""Computed once for all samples of all prompts: by the generator's cache, and in a tree by the trainer."""


def smollm2() -> RunConfig:
    """GRPO on sums of two terms of one or two digits. `rl fetch smollm2` makes the model directory.

    What was tried, and why these settings: docs/smollm2.md.
    """
    return RunConfig(
        model=ModelDir("models/smollm2-135m-instruct"),
        env=ReasoningGym(
            dataset="chain_sum",
            options=(("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 2)),
            prompt_prefix=_EXAMPLES,
            stop=("\n",),
            chat=False,
            max_new_tokens=20,
            partial_credit="distance",
            num_eval=256,
        ),
        trainer=TrainerConfig(
            lr=2e-5, lr_warmup_steps=3, lr_schedule="linear", lr_min_ratio=0.1, max_tokens=2048
        ),
        entropy=EntropyBonus(target=0.25, adapt=0.005),
        generator=GeneratorConfig(kv_cache_gib=1.0, max_num_seqs=128),
        dtype="bfloat16",
        steps=75,
        prompts_per_step=32,
        group_size=8,
        minibatches=2,
        resampling_rounds=2,
        eval_every=10,
    )
