"""A tiny model learns to use a calculator: two turns and a tool, minutes on two CPU cores."""

from rl.config import GeneratorConfig, RunConfig, TrainerConfig, WarmupConfig
from rl.envs.calculator import ALPHABET, Calculator
from rl.models.sources import TinyQwen3


def calculator() -> RunConfig:
    """Warm up on demonstrations of which most call nothing, then lift accuracy by GRPO."""
    return RunConfig(
        model=TinyQwen3(alphabet=ALPHABET),
        env=Calculator(),
        warmup=WarmupConfig(steps=500, batch_size=128),
        trainer=TrainerConfig(lr=5e-4, betas=(0.9, 0.99)),
        generator=GeneratorConfig(kv_cache_gib=0.0625, block_size=128, max_num_seqs=512),
        steps=40,
        prompts_per_step=32,
        group_size=8,
    )
