"""CrossEntropy: supervised learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl.loss.base import LossOutput, TokenInputs
from rl.types import DataKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CrossEntropy:
    """loss = -sum_t w_t * logp_t. Weights may have either sign: a negative one teaches to avoid the token."""

    learns_from: ClassVar[DataKind] = "demonstrations"

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        return LossOutput(-(logprobs * inputs.weights).sum(), {})
