"""What every estimator takes. M sampled tokens of a rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

_NO_VALUES = np.zeros(0)


@dataclass(frozen=True)
class Trajectory:
    """A rollout as estimators see it."""

    rewards: np.ndarray
    """[M] float64: the verdict on the last token, a turn's on its last, penalties on their own tokens."""

    reward: float
    """The whole of it: their sum, or what a rollout without a token was rewarded with."""

    values: np.ndarray = field(default_factory=lambda: _NO_VALUES)
    """[M] the critic's value before each token; empty without a critic."""


Groups = Sequence[Sequence[Trajectory]]
"""The rollouts of a step by the prompts they belong to."""


def each_group(groups: Groups, advantages: Callable[[np.ndarray], np.ndarray]) -> list[list[float]]:
    """Apply a function of one group's rewards [G] -> [G] to every group."""
    return [advantages(np.array([t.reward for t in group])).tolist() if group else [] for group in groups]


def discounted_sums(values: np.ndarray, discount: float) -> np.ndarray:
    """[M] -> [M]: out_t = values_t + discount * out_(t+1)."""
    sums, total = np.empty(len(values)), 0.0
    for t in range(len(values) - 1, -1, -1):
        sums[t] = total = values[t] + discount * total
    return sums


def whiten(advantages: list[list[np.ndarray]], eps: float) -> list[list[np.ndarray]]:
    """Mean 0 and variance 1 over all tokens of the batch.

    The variance is the sample's (divisor n - 1), and eps is added to it. One token alone gets 0.
    """
    tokens = np.concatenate([a for group in advantages for a in group] or [np.zeros(0)])
    if len(tokens) < 2:
        return [[np.zeros(len(a)) for a in group] for group in advantages]
    mean, scale = tokens.mean(), 1 / np.sqrt(tokens.var(ddof=1) + eps)
    return [[(a - mean) * scale for a in group] for group in advantages]
