"""Logprobs and entropy of target tokens from logits, in fp32. V vocabulary, M tokens."""

from typing import Any

import torch


def logprobs_and_entropy(logits_MV: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, V] of any dtype, targets [M] -> logprobs [M] with gradient, entropy [M] without; fp32 nats.

    From bf16 logits without the upcast the error would be 0.05.
    """
    return _LogprobsAndEntropy.apply(logits_MV, targets)


_SMALLEST = -80.0
"""Below this many nats a probability nears fp32's smallest number, and its logarithm is taken another way."""


class _LogprobsAndEntropy(torch.autograd.Function):
    """One softmax for both and for the gradient: d logp_t / d logits = onehot(t) - p. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.dtype = logits_MV.dtype
        p_MV = logits_MV.softmax(-1, dtype=torch.float32)
        chosen = targets[:, None]
        logprobs = p_MV.gather(1, chosen)[:, 0].log()
        if len(vanished := torch.nonzero(logprobs < _SMALLEST)[:, 0]):
            log_p = logits_MV[vanished].log_softmax(-1, dtype=torch.float32)
            logprobs[vanished] = log_p.gather(1, chosen[vanished])[:, 0]
        # H = log Z - E[logit], and log Z = logit_t - logp_t of any token t.
        logits_MV = logits_MV.float()
        log_z = logits_MV.gather(1, chosen)[:, 0] - logprobs
        entropy = log_z - torch.bmm(p_MV[:, None, :], logits_MV[:, :, None])[:, 0, 0]
        ctx.save_for_backward(p_MV, targets)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        p_MV, targets = ctx.saved_tensors
        weights = gradient[:, None]
        return (p_MV * -weights).scatter_add_(1, targets[:, None], weights).to(ctx.dtype), None
