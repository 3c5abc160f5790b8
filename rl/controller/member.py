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

    def by_time(self, values: np.ndarray) -> np.ndarray:
        """[M] of the target tokens, branch after branch -> in the order in which they were sampled."""
        return values[_places(self.rollout)] if self.rollout.turn_order else values

    def split(self, values: float | np.ndarray) -> Sequence[float | np.ndarray]:
        """[M] in the order in which they were sampled, or one for all, for each sample."""
        if len(self.samples) == 1 or not np.ndim(values):
            return [values] * len(self.samples)
        of_branches = _by_branch(self.rollout, np.asarray(values))
        return np.split(of_branches, np.cumsum([s.num_targets for s in self.samples])[:-1])


def scatter_reward(rollout: Rollout, score: Score, bonus: float = 0.0) -> np.ndarray:
    """[M] float64: the reward at the last token, or each turn's at its end, or each token's.

    `bonus` is added at the last token. A turn without a token is rewarded at the token before it, or else at
    the first. Last, and before, are in the order of sampling, in which turns and tokens have their rewards.
    """
    lengths = rollout.turn_lengths
    rewards = np.zeros(sum(lengths))
    if not len(rewards):
        return rewards
    if score.parts.tokens:
        rewards += score.parts.tokens
    elif score.parts.turns:
        ends = np.cumsum([lengths[i] for i in rollout.turn_order] if rollout.turn_order else lengths)
        for end, reward in zip(ends, score.parts.turns, strict=True):
            rewards[max(end - 1, 0)] += reward
    else:
        rewards[-1] = score.reward
    rewards[-1] += bonus
    return _by_branch(rollout, rewards)


def _by_branch(rollout: Rollout, values: np.ndarray) -> np.ndarray:
    """[M] in the order in which tokens were sampled -> branch after branch."""
    if not rollout.turn_order:
        return values
    ordered = np.empty_like(values)
    ordered[_places(rollout)] = values
    return ordered


def _places(rollout: Rollout) -> np.ndarray:
    """[M] of each token in the order of sampling: its place among those of the branches."""
    ends = np.cumsum(rollout.turn_lengths)
    turns = np.split(np.arange(ends[-1]), ends[:-1])
    return np.concatenate([turns[i] for i in rollout.turn_order])
