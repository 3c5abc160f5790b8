"""ImportanceSampling: REINFORCE, corrected for the policy that sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl.loss.base import LossOutput, TokenInputs, log_ratio
from rl.types import DataKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ImportanceSampling:
    """REINFORCE with the ratio of each token (Tinker's importance_sampling).

    On-policy its gradient is that of REINFORCE.

    loss = -sum_t w_t * exp(logp_t - old_t) * A_t
    """

    learns_from: ClassVar[DataKind] = "rollouts"
    drops_zero_advantages: ClassVar[bool] = True

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        ratio = log_ratio(logprobs, inputs.old_logprobs).exp()
        return LossOutput(-(ratio * inputs.advantages * inputs.weights).sum(), {})
