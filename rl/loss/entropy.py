"""The entropy bonus: a reward for staying undecided, and its control towards a target."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rl.bounds import NonNegativeFloat
from rl.fields import refuse


@dataclass(frozen=True)
class EntropyBonus:
    """Takes coef * sum_t w_t * H_t off the loss; H_t is the entropy of the policy at token t, in nats.

    With a target the coefficient is controlled, as in Skywork-OR1 (arXiv 2505.22312, section 4.4): after each
    step it rises by `adapt` where the step's mean entropy was under the target and falls by as much, to 0 at
    the least, where it was not. It acts only in a step that follows one with less entropy than the target.
    """

    coef: NonNegativeFloat = 0.0
    """Weight of the bonus; with a target, where its control begins."""

    target: NonNegativeFloat = 0.0
    """Nats of mean entropy to hold at least; 0 keeps the coefficient as it is."""

    adapt: NonNegativeFloat = 0.005
    """By how much the coefficient changes after a step, with a target."""

    def __post_init__(self) -> None:
        refuse(self)

    def unread(self, prefix: str) -> list[str]:
        """A line for each field that was changed and has no effect, with the prefix before its name."""
        if self.target or self.adapt == EntropyBonus.adapt:
            return []
        return [f"{prefix}adapt={self.adapt} has no effect with {prefix}target=0; set a target"]

    @property
    def used(self) -> bool:
        return self.coef > 0 or self.target > 0


class EntropyControl:
    """The coefficient, step by step. Its `state` is a part of checkpoints."""

    def __init__(self, bonus: EntropyBonus, state: Mapping[str, Any] | None = None):
        """state: of the same bonus; another's is left alone: its settings were others."""
        self._bonus = bonus
        if not bonus.target or state is None or state.get("bonus", asdict(bonus)) != asdict(bonus):
            state = {"coef": bonus.coef, "entropy": bonus.target}
        self._coef: float = state["coef"]
        self._entropy: float = state["entropy"]

    @property
    def coef(self) -> float:
        """Of the next step."""
        return self._coef if not self._bonus.target or self._entropy < self._bonus.target else 0.0

    def observe(self, entropy: float) -> None:
        """entropy: the mean of the step that ended; NaN, where nothing was trained on, changes nothing."""
        if not self._bonus.target or entropy != entropy:
            return
        change = self._bonus.adapt if entropy < self._bonus.target else -self._bonus.adapt
        self._coef, self._entropy = max(0.0, self._coef + change), entropy

    @property
    def state(self) -> dict[str, Any]:
        return {"coef": self._coef, "entropy": self._entropy, "bonus": asdict(self._bonus)}
