"""Causal attention over packed documents by torch's SDPA: on a CPU, and in fp32 on a GPU.

torchtitan's varlen attention has no CPU kernel and computes in bf16 only; its flex attention has no backward on a CPU.
B batch (1), L row length, N heads, H head size, n documents of a bucket.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import rl.models.platform  # noqa: F401  sets torchtitan's device first

from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import VarlenAttention

_LENGTH_STEP = 32
"""Documents are padded to the longest of their bucket; a bucket holds lengths of one multiple of this."""


class PackedDocuments(NamedTuple):
    """Where the documents of a row lie, in buckets of similar length."""

    gather: tuple[torch.Tensor, ...]  # one [n, longest] index into L for each bucket; padding repeats the last token
    valid: tuple[torch.Tensor, ...]  # one [n * longest] bool for each bucket
    restore: torch.Tensor  # [L] index into the concatenated valid tokens of all buckets


def pack_documents(positions: np.ndarray, device: torch.device) -> PackedDocuments:
    """positions: [L], 0 at the first token of each document."""
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff([*starts, len(positions)])
    bucket_of = -(-lengths // _LENGTH_STEP)
    gather, valid, order = [], [], []
    for bucket in np.unique(bucket_of):
        chosen = np.flatnonzero(bucket_of == bucket)
        offsets = np.arange(lengths[chosen].max())[None, :]
        is_valid = offsets < lengths[chosen, None]
        index = starts[chosen, None] + np.minimum(offsets, lengths[chosen, None] - 1)
        gather.append(torch.from_numpy(index).to(device))
        valid.append(torch.from_numpy(is_valid.ravel()).to(device))
        order.append(index[is_valid])
    restore = torch.from_numpy(np.argsort(np.concatenate(order))).to(device)
    return PackedDocuments(tuple(gather), tuple(valid), restore)


class PackedSDPA(VarlenAttention):
    """Drop-in for VarlenAttention, whose tensor-parallel sharding rules it inherits."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: PackedDocuments,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: object,
    ) -> torch.Tensor:
        """Padding needs no mask: it follows a document's tokens, which attend only backwards."""
        outputs = []
        for gather, valid in zip(attention_masks.gather, attention_masks.valid, strict=True):
            q, k, v = (
                t[0].index_select(0, gather.flatten()).unflatten(0, gather.shape).transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH)
            )  # [n, N, longest, H]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            outputs.append(out.transpose(1, 2).flatten(0, 1)[valid])
        return torch.cat(outputs).index_select(0, attention_masks.restore).unsqueeze(0)


class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's selective policy, which knows the attention of GPUs but not the CPU's."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
