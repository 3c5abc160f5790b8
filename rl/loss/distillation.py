"""Distillation: the student's own samples, graded token by token by a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rl.loss.base import LossOutput, TokenInputs, log_ratio
from rl.types import DataKind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Distillation:
    """On-policy distillation: the gradient of the reverse KL of each next token.

    See arXiv 2306.13649 with reverse KL, and Thinking Machines, "On-Policy Distillation", 2025. The teacher
    is the reference model.

    A_t = ref_t - old_t, without gradient
    loss = -sum_t w_t * exp(logp_t - old_t) * A_t
    """

    learns_from: ClassVar[DataKind] = "rollouts"
    needs_reference: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = True
    needs_rewards: ClassVar[bool] = False

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs) -> LossOutput:
        teacher, old = inputs.loss_input("ref_logprobs"), inputs.old_logprobs
        ratio = log_ratio(logprobs, old).exp()
        loss = -(ratio * (teacher - old) * inputs.weights).sum()
        return LossOutput(loss, {"reverse_kl:sum": (inputs.generator_logprobs - teacher).sum()})
