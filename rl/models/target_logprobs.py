"""Logprobs and entropy of target tokens from hidden states, a chunk of the vocabulary's logits at a time.

M target tokens, D hidden size, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rl.loss.logprobs import logprobs_and_entropy
from rl.models.engine_config import CHUNK_ELEMENTS


def target_logprobs(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    h_MD: torch.Tensor,
    targets: torch.Tensor | None,
) -> Any:
    """targets [M] -> logprobs [M] and entropy [M], both with gradient, fp32 nats.

    logits_of: [m, D] -> [m, V]. Without targets: the logits [M, V].
    """
    if targets is None:
        return logits_of(h_MD)
    num_chunks = max(1, math.ceil(len(targets) * vocab_size / CHUNK_ELEMENTS))
    if num_chunks == 1:
        return logprobs_and_entropy(logits_of(h_MD), targets)

    def of_chunk(h: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_and_entropy(logits_of(h), t)

    chunks = zip(h_MD.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
    outputs = [checkpoint(of_chunk, h, t, use_reentrant=False) for h, t in chunks]
    logprobs, entropy = zip(*outputs, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def target_values(values_M1: torch.Tensor, targets: torch.Tensor | None) -> Any:
    """The same of a value head's output [M, 1]: values in the place of logprobs, and zeros for entropy."""
    return values_M1 if targets is None else (values_M1[:, 0], torch.zeros_like(values_M1[:, 0]))
