"""What every loss takes and returns.

A loss is a sum over the target tokens; the controller divides once, in `optim_step`. M target tokens of one
micro-batch, S sequences. All per-token tensors are [M]; `logprobs` and `entropy` carry the gradient, in nats.
A sequence is never split over micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rl.errors import RunError

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""Nats at which log-ratios are cut, as verl's of tokens are: e^20 and its gradient are finite in fp32."""


@dataclass(frozen=True)
class TokenInputs:
    """What a loss may look at beside the trainer's logprobs; all [M]."""

    generator_logprobs: torch.Tensor  # nats, under the policy that sampled the tokens
    advantages: torch.Tensor
    weights: torch.Tensor  # the token's share in the loss: 1 for token means
    sample_ids: torch.Tensor  # which sequence the token belongs to
    loss_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what else samples carry, by name
    entropy: torch.Tensor | None = None  # nats, of the trainer's policy; a critic has none

    def loss_input(self, name: str) -> torch.Tensor:
        """Raises RunError where the samples do not carry it; a batch without samples has them all, empty."""
        if not len(self.weights):
            return self.weights
        if name not in self.loss_inputs:
            raise RunError(
                f"the loss reads {name!r}, which the samples do not carry "
                f"(they have {sorted(self.loss_inputs) or 'none'})"
            )
        return self.loss_inputs[name]

    @property
    def old_logprobs(self) -> torch.Tensor:
        """What ratios are taken against: the loss input of that name (see Correction), or the generator's."""
        return self.loss_inputs.get("old_logprobs", self.generator_logprobs)

    def clip(self, ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
        """ratio [M], no lower than `low` and no higher than `high`.

        The loss inputs clip_low_threshold and clip_high_threshold, where samples have them, are each token's
        own bounds in their place.
        """
        lower = self.loss_inputs.get("clip_low_threshold", ratio.new_full((), low))
        upper = self.loss_inputs.get("clip_high_threshold", ratio.new_full((), high))
        return ratio.clamp(lower, upper)


class LossOutput(NamedTuple):
    loss: torch.Tensor  # scalar, a sum over tokens
    metrics: Mapping[str, torch.Tensor | float]  # scalars named `name:reduction`, reduction one of sum, max


def log_ratio(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def per_sequence(sample_ids: torch.Tensor) -> tuple[int, torch.Tensor]:
    """sample_ids [M] -> S, and the index [M] of each token's sequence: 0 to S - 1, in the order of ids."""
    ids, index = sample_ids.unique(return_inverse=True)
    return len(ids), index


def sequence_sums(values: torch.Tensor, num: int, index: torch.Tensor) -> torch.Tensor:
    """[M] -> [S]."""
    return values.new_zeros(num).index_add(0, index, values)


def sequence_means(
    values: torch.Tensor, sample_ids: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[M] -> [M]: each token gets the mean of its sequence, over the tokens where mask [M] is 1; else 0."""
    num, index = per_sequence(sample_ids)
    mask = values.new_ones(values.shape) if mask is None else mask
    means = sequence_sums(values * mask, num, index) / sequence_sums(mask, num, index).clamp(min=1.0)
    return means[index]
