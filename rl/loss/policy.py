"""Policy losses. Each is a sum over the scored tokens; the controller divides once, in `optim_step`.

M scored tokens. All inputs are [M]; `logprobs` carries the gradient, nats.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class TokenInputs(NamedTuple):
    """What a loss may look at beside the trainer's logprobs; all [M]."""

    generator_logprobs: torch.Tensor  # nats, under the policy that sampled the tokens
    advantages: torch.Tensor
    weights: torch.Tensor  # the token's share: 1 for token means
    sample_ids: torch.Tensor  # which sequence the token belongs to


class LossOutput(NamedTuple):
    loss: torch.Tensor  # scalar, a sum over tokens
    metrics: dict[str, torch.Tensor]  # scalars named `name:reduction`, reduction one of sum, max


@dataclass(frozen=True)
class Clip:
    """The clipped surrogate of PPO (arXiv 1707.06347, equation 7) with separate bounds (DAPO, arXiv 2503.14476).

    loss = -sum_t w_t * min(ratio_t * A_t, clip(ratio_t, 1 - low, 1 + high) * A_t), ratio_t = exp(logp_t - generator_logp_t)
    """

    low: float = 0.2
    """Lower clip: ratios under 1 - low get no gradient where the advantage is negative."""

    high: float = 0.28
    """Upper clip: ratios over 1 + high get no gradient where the advantage is positive."""

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        ratio = (logprobs - inputs.generator_logprobs).exp()
        unclipped = ratio * inputs.advantages
        clipped = ratio.clamp(1 - self.low, 1 + self.high) * inputs.advantages
        loss = -(torch.minimum(unclipped, clipped) * inputs.weights).sum()
        return LossOutput(loss, {"clip_fraction:sum": (clipped < unclipped).sum()})


@dataclass(frozen=True)
class CrossEntropy:
    """Supervised learning: loss = -sum_t w_t * logp_t."""

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        return LossOutput(-(logprobs * inputs.weights).sum(), {})
