"""What every estimator takes. M sampled tokens of a rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rl.errors import RunError
from rl.rewards import all_equal

if TYPE_CHECKING:
    from rl.interfaces import AdvantageEstimator

_NO_VALUES = np.zeros(0)


@dataclass(frozen=True)
class Trajectory:
    """A rollout as estimators see it."""

    rewards: np.ndarray
    """[M] float64, as they were sampled: the verdict on the last token, a turn's on its last, penalties on
    their own tokens."""

    reward: float
    """The whole of it: their sum, or what a rollout without a token was rewarded with."""

    values: np.ndarray = field(default_factory=lambda: _NO_VALUES)
    """[M] the critic's value before each token; empty without a critic."""


Groups = Sequence[Sequence[Trajectory]]
"""The rollouts of a step by the prompts they belong to."""


def estimate(estimator: "AdvantageEstimator", groups: Groups) -> Sequence[Sequence[float | np.ndarray]]:
    """What the estimator makes of the groups: for each trajectory [M], or one for all tokens.

    Raises RunError where a reward is not finite, or where it does not give a finite one for each token.
    """
    for group in groups:
        if not np.isfinite([t.reward for t in group]).all():
            raise RunError(f"rewards {[t.reward for t in group]} of a group are not finite")
    advantages = estimator(groups)
    check_estimates("advantages", advantages, groups, estimator)
    return advantages


def check_estimates(
    kind: str, values: Sequence[Sequence[float | np.ndarray]], groups: Groups, estimator: object
) -> None:
    """kind: "advantages" or "returns". Raises RunError where there is not a finite one for each token."""
    name = getattr(estimator, "__name__", type(estimator).__name__)
    if [len(group) for group in values] != [len(group) for group in groups]:
        raise RunError(
            f"advantages {name} returned {kind} for {[len(g) for g in values]} rollouts of "
            f"{[len(g) for g in groups]}; return as many, group by group"
        )
    for of_group, group in zip(values, groups, strict=True):
        for value, trajectory in zip(of_group, group, strict=True):
            if np.ndim(value) and np.shape(value) != trajectory.rewards.shape:
                raise RunError(
                    f"advantages {name} returned {np.shape(value)} {kind} for {trajectory.rewards.shape} "
                    f"tokens; return one for each"
                )
        if not np.isfinite(np.hstack([0.0, *of_group])).all():
            rewards = [t.reward for t in group]
            raise RunError(f"advantages {name} returned {kind} that are not finite, for rewards {rewards}")


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

    The variance is the sample's (divisor n - 1), and eps is added to it. Equal tokens, and one alone, get 0.
    """
    tokens = np.concatenate([a for group in advantages for a in group] or [np.zeros(0)])
    if not len(tokens) or all_equal([tokens.min(), tokens.max()]):
        return [[np.zeros(len(a)) for a in group] for group in advantages]
    mean, scale = tokens.mean(), 1 / np.sqrt(tokens.var(ddof=1) + eps)
    return [[(a - mean) * scale for a in group] for group in advantages]
