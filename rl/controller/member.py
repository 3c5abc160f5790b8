"""Member: a rollout on its way to what a step learns from, with its rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.types import Rollout, Sample, Score


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout on its way to a sample."""

    rollout: Rollout
    score: Score
    samples: tuple[Sample, ...]  # one for each branch
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """[M] float64, of each target token, branch after branch: shaped, less the KL penalty."""
    reward: float = 0.0
    """The whole of it; of a rollout without a token, what it would have been."""

    @property
    def num_targets(self) -> int:
        """M"""
        return sum([sample.num_targets for sample in self.samples])

    @property
    def has_advantages(self) -> bool:
        return any([sample.advantages.any() for sample in self.samples])

    def of_targets(self, name: str) -> np.ndarray:
        """[M] of a loss input."""
        return np.concatenate([s.loss_inputs[name][s.target_mask] for s in self.samples])

    def split(self, values: float | np.ndarray) -> Sequence[float | np.ndarray]:
        """[M], or one for all, for each sample."""
        if len(self.samples) == 1 or not np.ndim(values):
            return [values] * len(self.samples)
        return np.split(values, np.cumsum([s.num_targets for s in self.samples])[:-1])


def scatter_reward(rollout: Rollout, score: Score, bonus: float = 0.0) -> np.ndarray:
    """[M] float64: the reward at the last token, or each turn's at its end, or each token's.

    `bonus` is added at the last token. A turn without a token is rewarded at the token before it, or else at
    the first.
    """
    rewards = np.zeros(sum(rollout.turn_lengths))
    if not len(rewards):
        return rewards
    if score.parts.tokens:
        rewards += score.parts.tokens
    elif score.parts.turns:
        for end, reward in zip(np.cumsum(rollout.turn_lengths), score.parts.turns, strict=True):
            rewards[max(end - 1, 0)] += reward
    else:
        rewards[-1] = score.reward
    rewards[-1] += bonus
    return rewards
