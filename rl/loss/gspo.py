"""GSPO: ratios of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rl.bounds import NonNegativeFloat, Share
from rl.fields import refuse
from rl.loss.base import LossOutput, TokenInputs, log_ratio, sequence_means
from rl.types import DataKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GSPO:
    """Group sequence policy optimization (arXiv 2507.18071, equations 5 to 7; token form: 13 and 14).

    s_i = exp(mean_t (logp_t - old_t)) over the sampled tokens of sequence i
    loss = -sum_t w_t * min(s_i * A_t, clip(s_i, 1 - low, 1 + high) * A_t)

    A sequence is a Sample: a rollout, or each branch of a rollout that forks. A likelihood is of one context
    and of what was sampled in it. A later branch has an earlier branch's tokens as its context, so each
    sampled token is in one mean.

    In the token form s_i carries no gradient, and each token's own exp(logp_t - stop_gradient(logp_t)) = 1
    does. The loss input `sequence_ratio_mask`, where samples have it, says over which tokens the mean is (1).
    """

    low: Share = 3e-4
    """Lower clip of the sequence's ratio. Each branch of a rollout that forks is a sequence."""

    high: NonNegativeFloat = 4e-4
    """Upper clip of the sequence's ratio."""

    level: Literal["sequence", "token"] = "sequence"
    """Whose gradient: the sequence's ratio, or each token's (they differ where advantages or weights differ
    within a sequence). Each branch of a rollout that forks is a sequence."""

    learns_from: ClassVar[DataKind] = "rollouts"
    drops_zero_advantages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse(self)

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        mask = inputs.loss_inputs.get("sequence_ratio_mask")
        means = sequence_means(logprobs - inputs.old_logprobs, inputs.sample_ids, mask)
        ratio = log_ratio(means, means.new_zeros(())).exp()
        if self.level == "token":
            ratio = ratio.detach() * (logprobs - logprobs.detach()).exp()
        unclipped = ratio * inputs.advantages
        clipped = inputs.clip(ratio, 1 - self.low, 1 + self.high) * inputs.advantages
        loss = -(unclipped.minimum(clipped) * inputs.weights).sum()
        return LossOutput(loss, {"clip_fraction:sum": (clipped < unclipped).sum()})
