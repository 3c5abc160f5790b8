"""RLOO: leave one out."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rl.loss.advantages.base import Groups, each_group
from rl.rewards import all_equal


@dataclass(frozen=True)
class RLOO:
    """REINFORCE leave-one-out (arXiv 2402.14740): A_i = r_i - mean of the other rollouts' rewards.

    A rollout that is alone in its group gets 0.
    """

    compares_in_groups: ClassVar[bool] = True
    group_by_group: ClassVar[bool] = True
    reads_turns: ClassVar[bool] = False

    def __call__(self, groups: Groups) -> list[list[float]]:
        return each_group(groups, _advantages)


def _advantages(rewards_G: np.ndarray) -> np.ndarray:
    if all_equal(rewards_G.tolist()):
        return np.zeros(len(rewards_G))
    mean_of_others = (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)
    return rewards_G - mean_of_others
