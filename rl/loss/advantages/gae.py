"""GAE: advantages from a critic's values."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rl.bounds import NonNegativeFloat, Share
from rl.fields import refuse
from rl.loss.advantages.base import Groups, Trajectory, discounted_sums, whiten


@dataclass(frozen=True)
class GAE:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16), whitened over the batch.

    delta_t = r_t + discount * V_(t+1) - V_t, with V = 0 after the last token
    A_t = sum_l (discount * lam)^l * delta_(t+l);  return_t = A_t + V_t
    """

    discount: Share = 1.0
    """How much a reward counts one token earlier."""

    lam: Share = 0.95
    """0 trusts only the critic, 1 only the rewards."""

    whiten: bool = True
    """Mean 0 and variance 1 over the batch's tokens."""

    eps: NonNegativeFloat = 1e-8
    """Added to the variance in whitening."""

    needs_critic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse(self)

    def unread(self, prefix: str) -> list[str]:
        """A line for each field that was changed and has no effect, with the prefix before its name."""
        if self.whiten or self.eps == GAE.eps:
            return []
        return [f"{prefix}eps={self.eps} has no effect with {prefix}whiten=False; leave it"]

    def __call__(self, groups: Groups) -> list[list[np.ndarray]]:
        advantages = [[self._advantages(t) for t in group] for group in groups]
        return whiten(advantages, self.eps) if self.whiten else advantages

    def returns(self, groups: Groups) -> list[list[np.ndarray]]:
        """[M] of each rollout: what the critic learns to say. The advantages in it are not whitened."""
        return [[self._advantages(t) + t.values for t in group] for group in groups]

    def _advantages(self, trajectory: Trajectory) -> np.ndarray:
        values = trajectory.values
        deltas = trajectory.rewards + self.discount * np.append(values[1:], 0.0) - values
        return discounted_sums(deltas, self.discount * self.lam)
