"""SmolLM2-135M-Instruct, real pretrained weights, learns to add and subtract on two CPU cores."""

from rl.controller.config import GeneratorConfig, RunConfig, TrainerConfig
from rl.envs.reasoning import ReasoningGym
from rl.models.sources import ModelDir


def smollm2() -> RunConfig:
    """GRPO on sums of two terms of one or two digits. `rl fetch smollm2` makes the model directory."""
    return RunConfig(
        model=ModelDir("models/smollm2-135m-instruct"),
        env=ReasoningGym(
            dataset="chain_sum",
            options=(("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 2)),
            max_new_tokens=24,
            num_eval=256,
        ),
        trainer=TrainerConfig(lr=2e-5, lr_warmup_steps=3, max_tokens=2048),
        generator=GeneratorConfig(kv_cache_gib=1.0, max_num_seqs=128),
        dtype="bfloat16",
        steps=40,
        prompts_per_step=16,
        group_size=8,
        eval_every=10,
    )
