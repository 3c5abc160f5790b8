"""Logprobs and entropy of target tokens from logits, in fp32. V vocabulary, M tokens."""

from typing import Any

import torch

_CACHED_ELEMENTS, _PART_ELEMENTS = 2**19, 2**24
"""Of logits at a time: on a CPU what stays in its cache; elsewhere what takes little memory beside them."""


def logprobs_and_entropy(logits_MV: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [M, V] of any dtype, targets [M] -> logprobs [M], entropy [M], both with gradient; fp32 nats.

    From bf16 logits without the upcast the error would be 0.05.
    """
    return _LogprobsAndEntropy.apply(logits_MV, targets)


def _mean_below(top: torch.Tensor, logits_MV: torch.Tensor, p_MV: torch.Tensor) -> torch.Tensor:
    """sum_v p_v (logit_v - top) [M]: small numbers, of which a sum over a vocabulary loses nothing.

    Some rows at a time.
    """
    elements = _CACHED_ELEMENTS if top.device.type == "cpu" else _PART_ELEMENTS
    num_rows = max(1, elements // logits_MV.shape[1])
    parts = zip(top.split(num_rows), logits_MV.split(num_rows), p_MV.split(num_rows), strict=True)
    return torch.cat([((logits - high[:, None]) * p).sum(-1) for high, logits, p in parts])


class _LogprobsAndEntropy(torch.autograd.Function):
    """One softmax for both and for the gradients. Differentiable once.

    d logp_t / d logits = onehot(t) - p, and d H / d logits = -p (log p + H), which costs nothing where no
    loss reads the entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_MV: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.dtype = logits_MV.dtype
        p_MV = logits_MV.softmax(-1, dtype=torch.float32)
        # By way of the likeliest token, whose probability is no smaller than 1 / V: others may be 0 in fp32.
        top, likeliest = logits_MV.max(-1)
        log_p_top = p_MV.gather(1, likeliest[:, None])[:, 0].log()
        logits_MV, top = logits_MV.float(), top.float()
        logprobs = logits_MV.gather(1, targets[:, None])[:, 0] - top + log_p_top
        entropy = -log_p_top - _mean_below(top, logits_MV, p_MV)
        ctx.save_for_backward(p_MV, targets, entropy)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None]:
        p_MV, targets, entropy = ctx.saved_tensors
        gradient = None
        if of_logprobs is not None:
            weights = of_logprobs[:, None]
            gradient = (p_MV * -weights).scatter_add_(1, targets[:, None], weights)
        if of_entropy is not None:
            surprise = torch.xlogy(p_MV, p_MV).addcmul_(p_MV, entropy[:, None])
            surprise *= -of_entropy[:, None]
            gradient = surprise if gradient is None else gradient.add_(surprise)
        return (None if gradient is None else gradient.to(ctx.dtype)), None
