"""ReinforcePP: REINFORCE++, normalised over the whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rl.bounds import NonNegativeFloat, Share
from rl.fields import refuse
from rl.loss.advantages.base import Groups, Trajectory, discounted_sums, whiten


@dataclass(frozen=True)
class ReinforcePP:
    """REINFORCE++ (arXiv 2501.03262): each token's return, whitened over all tokens of the batch.

    G_t = sum_(s >= t) discount^(s - t) * r_s;  A_t = (G_t - mean) / sqrt(var + eps) over the batch
    """

    discount: Share = 1.0
    """How much a reward counts one token earlier."""

    baseline: Literal["none", "group_mean"] = "none"
    """Before whitening, subtract the group's mean reward from each rollout's (REINFORCE++-baseline), spread
    evenly over the whole rollout: the return is then the centred reward, and the discount is not used."""

    eps: NonNegativeFloat = 1e-8
    """Added to the variance."""

    def __post_init__(self) -> None:
        refuse(self)

    def unread(self, prefix: str) -> list[str]:
        """A line for each field that was changed and has no effect, with the prefix before its name."""
        if self.baseline == "none" or self.discount == ReinforcePP.discount:
            return []
        return [
            f"{prefix}discount={self.discount} has no effect with {prefix}baseline=group_mean; "
            f"set one of them"
        ]

    @property
    def compares_in_groups(self) -> bool:
        return self.baseline == "group_mean"

    @property
    def reads_turns(self) -> bool:
        return self.baseline == "none"

    def __call__(self, groups: Groups) -> list[list[np.ndarray]]:
        return whiten([self._returns(group) for group in groups], self.eps)

    def _returns(self, group: Sequence[Trajectory]) -> list[np.ndarray]:
        if self.baseline == "none":
            return [discounted_sums(t.rewards, self.discount) for t in group]
        mean = np.mean([t.reward for t in group]) if group else 0.0
        return [np.full(len(t.rewards), t.reward - mean) for t in group]
