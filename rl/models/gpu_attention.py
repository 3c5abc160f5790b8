"""Attention over packed rows in bf16 on a GPU: varlen flash kernels, or FlexAttention where sequences branch.

torchtitan's varlen attention has no CPU kernel, computes only in bf16 and has no context parallelism, and its
flex attention has no backward on a CPU: `attention.py` serves those.
B batch (1), L tokens of a row, N heads, H head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

import rl.models.platform  # noqa: F401  sets torchtitan's device first
from rl.batching import has_branches
from rl.models.attention import stretches
from rl.models.cuda import activate_flash_attention

from torchtitan.models.common.attention import (
    VarlenAttention,
    VarlenMetadata,
    create_attention_mask,
    create_varlen_metadata_for_document,
)
from torchtitan.protocols.module import Module

# How often one function is compiled: for rows with and without branches, of one block and of more, for what
# needs a gradient beside an adapter, and for each adapter's rank. Past torch's limit of 8 a compiled model
# fails, and FlexAttention goes on without its kernel, with all scores in memory.
torch._dynamo.config.recompile_limit = 64
_compiled_flex_attention = torch.compile(flex_attention, dynamic=True)  # rows are of new lengths all the time
_KERNELS: FlexKernelOptions = {"BACKEND": "TRITON"}
"""Left to choose, torch takes its kernel for decoding for rows of under 128 tokens, and fails where these,
times the query heads of a key head, are over 128 (2.13.0; pytorch/pytorch#185349)."""


def gpu_documents(positions: np.ndarray, device: torch.device) -> VarlenMetadata | BlockMask:
    """positions: [L], of a MicroBatch."""
    if not has_branches(positions):
        return create_varlen_metadata_for_document(torch.from_numpy(positions).to(device)[None])
    size = len(positions)
    return create_attention_mask(ancestor_mask(positions, device), 1, None, size, size, device=device)


def ancestor_mask(positions: np.ndarray, device: torch.device) -> Callable[..., torch.Tensor]:
    """FlexAttention's mask_mod: a token sees its ancestors and itself.

    The row is depth first, so what comes after a token up to the end of its subtree are its descendants.
    """
    ends = np.full(len(positions), len(positions))  # where each token's subtree ends
    before = np.arange(0)
    for first, path in stretches(positions):
        ends[before[positions[first] :]] = first
        before = path
    subtree_ends = torch.from_numpy(ends).to(device)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < subtree_ends[key])

    return sees


class VarlenOrFlex(VarlenAttention):
    """torchtitan's varlen attention, with the fastest kernels that are there; trees through FlexAttention.

    torchtitan's own fails where the kernels that it asks for are not installed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: VarlenAttention.Config):
        Module.__init__(self)
        self.window_size = config.window_size
        self.kernels = activate_flash_attention()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata | BlockMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: object,
    ) -> torch.Tensor:
        if isinstance(attention_masks, VarlenMetadata):
            options = {"attention_masks": attention_masks, "scale": scale, "enable_gqa": enable_gqa}
            return super().forward(q_BLNH, k_BLNH, v_BLNH, **options, **kwargs)
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = _compiled_flex_attention(
            q,
            k,
            v,
            block_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
            kernel_options={**_KERNELS},
        )
        return out.transpose(1, 2)
