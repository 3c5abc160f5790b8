"""Correction: what is done about the gap between the generator that sampled and the trainer that learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rl.bounds import NonNegativeFloat
from rl.fields import refuse
from rl.loss.base import TokenInputs, log_ratio, per_sequence, sequence_sums

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Correction:
    """Truncated importance sampling and masking, for tokens or for sequences.

    The papers: F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025;
    IcePop, Ling Team, 2025.

    gap_t = exp(trainer_t - generator_t); of a sequence: the product over its sampled tokens

    A sequence is a Sample: a rollout, or each branch of a rollout that forks (see GSPO).

    trainer_t is the trainer's logprob before the first update on the batch: the loss input `old_logprobs`, or
    without that the logprob in this update. A token's weight is multiplied by min(gap_t, tis_clip), and is 0
    where the gap lies outside [mask_low, mask_high]. Such tokens still count in the mean.
    """

    old_logprobs: Literal["generator", "trainer"] = "generator"
    """Whose logprobs the losses' ratios are taken against. "generator" lets the ratio itself correct the gap
    (verl calls it bypass); "trainer" keeps to PPO's own ratio, and takes one more forward pass where a batch
    serves several steps."""

    tis_clip: NonNegativeFloat = 0.0
    """Upper bound of the importance weight; 0 is no weight. Needs old_logprobs=trainer."""

    mask_low: NonNegativeFloat = 0.0
    """Tokens (sequences) with a smaller gap do not learn."""

    mask_high: NonNegativeFloat = 0.0
    """Tokens (sequences) with a larger gap do not learn; 0 is no bound."""

    level: Literal["token", "sequence"] = "token"
    """Weights and masks for each token, or for whole sequences. Each branch of a rollout that forks is a
    sequence."""

    def __post_init__(self) -> None:
        refuse(self)

    def conflicts(self, prefix: str) -> list[str]:
        """A line for each pair of fields that exclude each other, with the prefix before their names."""
        lines = []
        if self.tis_clip and self.old_logprobs == "generator":
            lines.append(f"{prefix}tis_clip={self.tis_clip} needs {prefix}old_logprobs=trainer; set it")
        if 0 < self.mask_high < self.mask_low:
            lines.append(
                f"{prefix}mask_high={self.mask_high} is under {prefix}mask_low={self.mask_low}; swap them"
            )
        return lines

    def unread(self, prefix: str) -> list[str]:
        """A line for each field that was changed and has no effect, with the prefix before its name."""
        if self.level == "token" or self.tis_clip or self.mask_low or self.mask_high:
            return []
        return [
            f"{prefix}level=sequence has no effect without {prefix}tis_clip, mask_low or mask_high; set one"
        ]

    @property
    def reads_the_trainers(self) -> bool:
        """Whether anything depends on the trainer's logprobs before the first update."""
        return self.old_logprobs == "trainer" or self.mask_low > 0 or self.mask_high > 0

    def __call__(
        self, logprobs: torch.Tensor, inputs: TokenInputs
    ) -> tuple[TokenInputs, dict[str, torch.Tensor]]:
        """The inputs with changed weights, and with what ratios are taken against as input `old_logprobs`."""
        trainers = inputs.loss_inputs.get("old_logprobs", logprobs.detach())
        weights = inputs.weights
        metrics: dict[str, torch.Tensor] = {}
        if self.tis_clip or self.mask_low or self.mask_high:
            gap = self._gap(trainers, inputs)
        if self.tis_clip:
            importance = gap.clamp(max=self.tis_clip)
            weights = weights * importance
            metrics |= {"tis/weight:sum": importance.sum(), "tis/clipped:sum": (gap > self.tis_clip).sum()}
        if self.mask_low or self.mask_high:
            outside = (gap < self.mask_low) | (gap > (self.mask_high or math.inf))
            weights = weights.masked_fill(outside, 0.0)
            metrics["gap_masked:sum"] = outside.sum()
        against = trainers if self.old_logprobs == "trainer" else inputs.generator_logprobs
        loss_inputs = {**inputs.loss_inputs, "old_logprobs": against}
        return replace(inputs, weights=weights, loss_inputs=loss_inputs), metrics

    def _gap(self, trainers: torch.Tensor, inputs: TokenInputs) -> torch.Tensor:
        """[M]"""
        apart = trainers - inputs.generator_logprobs
        if self.level == "sequence":
            num, index = per_sequence(inputs.sample_ids)
            apart = sequence_sums(apart, num, index)[index]
        return log_ratio(apart, apart.new_zeros(())).exp()
