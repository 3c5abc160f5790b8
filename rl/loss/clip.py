"""Clip: the surrogate of PPO, GRPO and DAPO, with dual clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl.bounds import NonNegativeFloat, Share, ZeroOrOverOne
from rl.fields import refuse
from rl.loss.base import LossOutput, TokenInputs, log_ratio
from rl.types import DataKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Clip:
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7).

    With separate bounds, as in DAPO (arXiv 2503.14476, equation 10).

    loss = -sum_t w_t * min(ratio_t * A_t, clip(ratio_t, 1 - low, 1 + high) * A_t)
    ratio_t = exp(logp_t - old_t)
    """

    low: Share = 0.2
    """Lower clip: ratios under 1 - low get no gradient where the advantage is negative."""

    high: NonNegativeFloat = 0.28
    """Upper clip: ratios over 1 + high get no gradient where the advantage is positive."""

    dual: ZeroOrOverOne = 0.0
    """Dual clip (arXiv 1912.09729): where the advantage is negative, the term is at least dual * A_t; 0 is
    off."""

    learns_from: ClassVar[DataKind] = "rollouts"
    drops_zero_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse(self)

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        ratio, advantages = log_ratio(logprobs, inputs.old_logprobs).exp(), inputs.advantages
        unclipped = ratio * advantages
        clipped = inputs.clip(ratio, 1 - self.low, 1 + self.high) * advantages
        terms = unclipped.minimum(clipped)
        metrics = {"clip_fraction:sum": (clipped < unclipped).sum()}
        if self.dual:
            bounded = terms.maximum(self.dual * advantages).where(advantages < 0, terms)
            metrics["dual_clip_fraction:sum"] = (bounded > terms).sum()
            terms = bounded
        return LossOutput(-(terms * inputs.weights).sum(), metrics)
