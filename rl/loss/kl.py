"""KL: the penalty for leaving the reference policy, and its three estimators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl.bounds import NonNegativeFloat
from rl.fields import refuse
from rl.loss.base import log_ratio

if TYPE_CHECKING:
    import torch

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class KL:
    """The divergence of policy from reference, estimated at each sampled token.

    The estimators: J. Schulman, "Approximating KL divergence", 2020.

    With d_t = logp_t - ref_t:  k1 = d_t,  k2 = d_t^2 / 2,  k3 = exp(-d_t) - 1 + d_t
    """

    coef: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 is none, and no reference is computed."""

    estimator: Estimator = "k3"
    """k1 is unbiased, and negative at times; k2 and k3 are never negative. In the loss, k2 has the gradient
    of the KL itself, k3 (GRPO's) one that equals it near the reference, and k1 one whose mean is 0: use k1
    only in the reward."""

    into: Literal["loss", "reward"] = "loss"
    """Add coef * kl_t to the loss of each token (GRPO), or take it off each token's reward before advantages
    are estimated (PPO)."""

    def __post_init__(self) -> None:
        refuse(self)

    @property
    def in_loss(self) -> bool:
        return self.coef > 0 and self.into == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coef > 0 and self.into == "reward"


def estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """[M] nats for each token; log-ratios are cut (see base.log_ratio) where they are exponentiated."""
    apart = logprobs - ref_logprobs
    if estimator == "k1":
        return apart
    if estimator == "k2":
        return apart.square() / 2
    if estimator == "k3":
        inside = log_ratio(logprobs, ref_logprobs)
        return (-inside).exp() - 1 + inside
    raise ValueError(f"estimator={estimator!r} is none of k1, k2, k3")
