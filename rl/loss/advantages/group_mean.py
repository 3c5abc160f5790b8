"""GroupMean: GRPO's and Dr.GRPO's advantages."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from rl.bounds import NonNegativeFloat
from rl.fields import refuse
from rl.loss.advantages.base import Groups, each_group
from rl.rewards import all_equal


@dataclass(frozen=True)
class GroupMean:
    """Each rollout's reward minus its group's mean (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A_i = (r_i - mean(r)) / (std(r) + eps)

    The standard deviation is the sample's (divisor G - 1), as in TRL and verl.
    """

    compares_in_groups: ClassVar[bool] = True
    group_by_group: ClassVar[bool] = True
    reads_turns: ClassVar[bool] = False

    adv_norm: Literal["group_std", "none"] = "group_std"
    """Divide by the group's standard deviation (GRPO), or not (Dr.GRPO, arXiv 2503.20783)."""

    eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        refuse(self)

    def unread(self, prefix: str) -> list[str]:
        """A line for each field that was changed and has no effect, with the prefix before its name."""
        if self.adv_norm == "group_std" or self.eps == GroupMean.eps:
            return []
        return [f"{prefix}eps={self.eps} has no effect with {prefix}adv_norm=none; leave it"]

    def __call__(self, groups: Groups) -> list[list[float]]:
        return each_group(groups, self._advantages)

    def _advantages(self, rewards_G: np.ndarray) -> np.ndarray:
        if all_equal(rewards_G.tolist()):
            return np.zeros(len(rewards_G))
        centred = rewards_G - rewards_G.mean()
        return centred if self.adv_norm == "none" else centred / (rewards_G.std(ddof=1) + self.eps)
