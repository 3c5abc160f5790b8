"""Credit: from the rewards of a group to one advantage for each rollout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GroupMean:
    """GRPO's advantages: each reward less its group's mean (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""

    adv_norm: Literal["group_std", "none"] = "group_std"
    """Divide by the group's standard deviation (GRPO), or not (Dr.GRPO, arXiv 2503.20783)."""

    eps: float = 1e-6
    """Added to the standard deviation."""

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        """rewards: [G]. Returns [G] advantages; all zero where every reward is the same.

        The standard deviation is the sample's (divisor G - 1), as in TRL and verl.
        """
        mean = math.fsum(rewards) / len(rewards)
        centred = [r - mean for r in rewards]
        if max(rewards) == min(rewards):
            return [0.0] * len(rewards)
        if self.adv_norm == "none":
            return centred
        std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
        return [c / (std + self.eps) for c in centred]
