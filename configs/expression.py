"""A tiny model learns to write expressions that a sandbox checks: minutes on two CPU cores."""

from rl.config import GeneratorConfig, RewardConfig, RunConfig, TrainerConfig, WarmupConfig
from rl.envs.expression import ALPHABET, Expression
from rl.models.sources import TinyQwen3


def code() -> RunConfig:
    """What the model writes is run in a sandbox; the reward is whether it has the value asked for."""
    return RunConfig(
        model=TinyQwen3(alphabet=ALPHABET),
        env=Expression(),
        reward=RewardConfig(num_procs=2, limit_seconds=10.0),
        warmup=WarmupConfig(steps=150, batch_size=128),
        trainer=TrainerConfig(lr=5e-4, betas=(0.9, 0.99)),
        generator=GeneratorConfig(kv_cache_gib=0.0625, block_size=128, max_num_seqs=512),
        steps=40,
        prompts_per_step=8,
        group_size=8,
    )
