"""CrossEntropy: supervised learning."""

from dataclasses import dataclass

import torch

from rl.loss.base import LossOutput, TokenInputs


@dataclass(frozen=True)
class CrossEntropy:
    """loss = -sum_t w_t * logp_t. Weights may have either sign: a negative one teaches to avoid the token."""

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        return LossOutput(-(logprobs * inputs.weights).sum(), {})
