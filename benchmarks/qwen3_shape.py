"""A recipe of Qwen3-0.6B's shape with random weights: what it takes, where no weights can be fetched."""

from dataclasses import dataclass

from rl.config import RunConfig, TrainerConfig
from rl.envs.sort_letters import ALPHABET, SortLetters
from rl.models.known_shapes import known_config
from rl.models.sources import TinyQwen3
from rl.types import Problem, StopReason

MAX_LENGTH = 4096


@dataclass(frozen=True)
class Shape(TinyQwen3):
    """The sizes of a public model, and a tokenizer of single characters."""

    name: str = "Qwen/Qwen3-0.6B"

    def config(self) -> dict:
        shape = known_config(self.name)
        assert shape is not None, self.name
        return super().config() | shape | {"max_position_embeddings": MAX_LENGTH}


@dataclass(frozen=True)
class Lengths(SortLetters):
    """Words of a model that knows nothing, of which each gets some reward: every group has a signal."""

    def reward(self, problem: Problem, response: str, stop: StopReason) -> float:
        return len(response) % 8 / 8


def qwen3_0_6b_shape() -> RunConfig:
    return RunConfig(
        model=Shape(ALPHABET),
        env=Lengths(max_new_tokens=256, num_eval=8),
        trainer=TrainerConfig(lr=1e-6),
        steps=8,
        prompts_per_step=32,
        group_size=8,
    )
