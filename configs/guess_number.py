"""TextArena's GuessTheNumber with SmolLM2-135M: a game of up to eight turns. Needs `make environments`."""

from dataclasses import replace

from rl.config import RewardConfig, RunConfig, WarmupConfig
from rl.configs.smollm2 import smollm2
from rl.envs.adapters.textarena import TextArena


def guess_number() -> RunConfig:
    """GRPO on whole games; the game's own reward is 1 for the right number."""
    return replace(
        smollm2(),
        env=TextArena(
            game="GuessTheNumber-v0",
            options=(("max_turns", 8),),
            max_turns=9,
            max_new_tokens=16,
            num_eval=32,
        ),
        reward=RewardConfig(limit_seconds=10.0),
        warmup=WarmupConfig(),
        steps=40,
        prompts_per_step=4,
        group_size=8,
        minibatches=1,
    )
