"""Controls: what a run learns of itself from step to step, a part of its checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl.config.algorithm import Algorithm
from rl.config.learning import Learning
from rl.controller.parity import Parity
from rl.loss.entropy import EntropyControl


class Controls:
    """entropy: the coefficient of its bonus. parity: for how long generator and trainer have differed."""

    def __init__(self, learning: Learning, state: Mapping[str, Any]):
        """state: empty, or what an earlier part of the run had."""
        self._algorithm = learning.algorithm
        self.entropy = EntropyControl(learning.algorithm.entropy, state.get("entropy"))
        self.parity = Parity(learning.max_logprob_diff, state.get("parity"))

    @property
    def state(self) -> dict[str, Any]:
        return {"entropy": self.entropy.state, "parity": self.parity.state}

    @property
    def algorithm(self) -> Algorithm:
        """Of the next step: with a target, the coefficient of the entropy bonus changes from step to step."""
        bonus = replace(self._algorithm.entropy, coef=self.entropy.coef)
        return replace(self._algorithm, entropy=bonus)
