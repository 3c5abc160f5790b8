"""vLLM's LoRA products on a CPU, by adapter.

vLLM 0.32 copies an adapter's whole matrix for each token (vllm/lora/ops/torch_ops/lora_ops.py): the head's
alone is vocabulary x rank numbers. It takes the last slot's for tokens without an adapter, and fails where
logprobs of prompts are asked for. Here each adapter's matrix multiplies its own tokens; -1 means no adapter.
The head has none: ours never adapt it.
"""

from collections.abc import Iterator

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
    size = lora_b_weights.shape[-2]
    output_tensor[:, :size] = 0
    for rows, product in _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype):
        output_tensor[rows, :size] = scaling * product


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
    columns = slice(slice_offset, slice_offset + slice_size)
    if not add_inputs:
        output_tensor[:, columns] = 0
    for rows, product in _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype):
        output_tensor[rows, columns] += product[:, :slice_size]


def _products(
    inputs: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
    """(rows, their product with their adapter's matrix) for each adapter that has some."""
    indices = indices[: len(inputs)]
    for index in indices.unique().tolist():
        if index < 0:
            continue
        mine = indices == index
        rows = slice(None) if bool(mine.all()) else mine
        matrix = weights[index].reshape(weights.shape[-2:]).to(dtype)
        yield rows, inputs[rows].to(dtype) @ matrix.T
