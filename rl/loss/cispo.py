"""CISPO: clipped importance weights, gradients for every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl.bounds import NonNegativeFloat, Share
from rl.fields import refuse
from rl.loss.base import LossOutput, TokenInputs, log_ratio
from rl.types import DataKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CISPO:
    """Clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    loss = -sum_t w_t * stop_gradient(clip(ratio_t, 1 - low, 1 + high)) * A_t * logp_t
    ratio_t = exp(logp_t - old_t)
    """

    low: Share = 1.0
    """Lower clip; 1, as in the paper, is none."""

    high: NonNegativeFloat = 4.0
    """Upper clip: weights are at most 1 + high."""

    learns_from: ClassVar[DataKind] = "rollouts"
    drops_zero_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse(self)

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        ratio = log_ratio(logprobs.detach(), inputs.old_logprobs).exp()
        weight = inputs.clip(ratio, 1 - self.low, 1 + self.high)
        loss = -(weight * inputs.advantages * logprobs * inputs.weights).sum()
        return LossOutput(loss, {"clip_fraction:sum": (weight != ratio).sum()})
