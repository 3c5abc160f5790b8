"""DRO: off-policy learning without ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl.bounds import NonNegativeFloat
from rl.fields import refuse
from rl.loss.base import LossOutput, TokenInputs
from rl.types import DataKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DRO:
    """Direct reward optimisation (arXiv 2405.19107), for tokens as in Tinker's dro.

    loss = -sum_t w_t * (logp_t * A_t - beta / 2 * (logp_t - old_t)^2)
    """

    beta: NonNegativeFloat = 0.05
    """Strength of the pull towards the policy that sampled."""

    learns_from: ClassVar[DataKind] = "rollouts"

    def __post_init__(self) -> None:
        refuse(self)

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        apart = logprobs - inputs.old_logprobs
        terms = logprobs * inputs.advantages - self.beta / 2 * apart.square()
        metrics = {"apart_squared:sum": apart.detach().square().sum()}
        return LossOutput(-(terms * inputs.weights).sum(), metrics)
