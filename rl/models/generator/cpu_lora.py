"""vLLM's LoRA products on a CPU, by adapter.

vLLM 0.32 copies an adapter's whole matrix for each token (vllm/lora/ops/torch_ops/lora_ops.py): the head's
alone is vocabulary x rank numbers. It takes the last slot's for tokens without an adapter, and fails where
logprobs of prompts are asked for. Here each adapter's matrix multiplies its own tokens; -1 means no adapter.
The head has none: ours never adapt it.
"""

from functools import lru_cache

import numpy as np
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu


def install() -> None:
    """For this process."""
    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink = bgmv_shrink
        module.bgmv_expand = bgmv_expand
        module.bgmv_expand_slice = bgmv_expand_slice
    punica_cpu.PunicaWrapperCPU.add_lora_logits = lambda *_args, **_settings: None


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """inputs [T, I], weights [slots, (1,) r, I] -> output [T, r]; 0 for tokens without an adapter."""
    output = output_tensor[:, : lora_b_weights.shape[-2]]
    output.zero_()
    _add_products(output, inputs, lora_b_weights, lora_indices_tensor, scaling)


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """inputs [T, r], weights [slots, (1,) O, r] -> added to, or put into, output [T, O]."""
    size = min(output_tensor.shape[1], lora_b_weights.shape[-2])
    bgmv_expand_slice(inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, size, add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """As bgmv_expand, into some columns."""
    output = output_tensor[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        output.zero_()
    weights = lora_b_weights[..., :slice_size, :]
    _add_products(output, inputs, weights, lora_indices_tensor)


def _add_products(
    output: torch.Tensor,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Add each row's product with its adapter's matrix."""
    for index, rows in _rows_by_adapter(indices[: len(inputs)].numpy().tobytes()):
        matrix = weights[index].reshape(weights.shape[-2:]).to(output.dtype)
        mine = inputs[rows].to(output.dtype)
        if isinstance(rows, slice):
            output[rows].addmm_(mine, matrix.T, alpha=scaling)
        else:
            output.index_add_(0, rows, mine @ matrix.T, alpha=scaling)


@lru_cache(maxsize=16)
def _rows_by_adapter(indices: bytes) -> list[tuple[int, slice | torch.Tensor]]:
    """Every layer of a step asks for the same. indices: [T] int64, each token's adapter, or -1."""
    adapters = np.frombuffer(indices, np.int64)
    found: list[tuple[int, slice | torch.Tensor]] = []
    for index in np.unique(adapters[adapters >= 0]).tolist():
        rows = np.flatnonzero(adapters == index)
        first, end = int(rows[0]), int(rows[-1]) + 1
        found.append((index, slice(first, end) if len(rows) == end - first else torch.from_numpy(rows)))
    return found
