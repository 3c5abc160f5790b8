"""SmolLM2-135M-Instruct, real pretrained weights, learns to add and subtract on two CPU cores."""

from rl.controller.config import GeneratorConfig, RunConfig, TrainerConfig
from rl.envs.reasoning import ReasoningGym
from rl.loss.entropy import EntropyBonus
from rl.models.sources import ModelDir


def smollm2() -> RunConfig:
    """GRPO on sums of two terms of one or two digits. `rl fetch smollm2` makes the model directory.

    What was tried, and why these settings: docs/smollm2.md.
    """
    return RunConfig(
        model=ModelDir("models/smollm2-135m-instruct"),
        env=ReasoningGym(
            dataset="chain_sum",
            options=(("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 2)),
            # An example of 32 tokens with what follows up to the numbers: one block of the generator's
            # cache, which all samples of all prompts share.
            prompt_prefix="State the final answer to the following arithmetic problem: 23 - 58 = -35\n",
            stop=("\n",),
            chat=False,
            max_new_tokens=8,
            partial_credit="distance",
            num_eval=256,
        ),
        trainer=TrainerConfig(
            lr=2e-5, lr_warmup_steps=3, lr_schedule="linear", lr_min_ratio=0.1, max_tokens=2048
        ),
        entropy=EntropyBonus(target=0.3, adapt=0.002),
        generator=GeneratorConfig(kv_cache_gib=1.0, max_num_seqs=128),
        dtype="bfloat16",
        steps=65,
        prompts_per_step=32,
        group_size=8,
        minibatches=2,
        eval_every=10,
    )
