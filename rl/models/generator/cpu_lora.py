"""vLLM's LoRA products on a CPU, by adapter.

vLLM 0.32 copies an adapter's whole matrix for each token (vllm/lora/ops/torch_ops/lora_ops.py): the head's
alone is vocabulary x rank numbers. It takes the last slot's for tokens without an adapter, and fails where
logprobs of prompts are asked for. Here the matrices of all adapters multiply their own tokens at once; -1
means no adapter. The head has none: ours never adapt it.
"""

from functools import lru_cache
from typing import Any, NamedTuple

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
    punica_cpu.PunicaWrapperCPU.update_metadata = _update_metadata


def _update_metadata(wrapper: Any, *metadata: Any, **_settings: Any) -> None:
    """Prefill is as decoding: the adapter of each token is known."""
    wrapper._update_base_metadata(*metadata)
    wrapper.is_prefill = False


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
    """Add each row's product with its adapter's matrix, rounded first, as the trainer's LoRA does."""
    dtype, shape = output.dtype, weights.shape[-2:]
    for batch in _batches(indices[: len(inputs)].numpy().tobytes()):
        if len(batch.adapters) == 1 and batch.has_all_rows:
            matrix = weights[int(batch.adapters)].reshape(shape).to(dtype)
            output.add_(inputs.to(dtype) @ matrix.T, alpha=scaling)
            continue
        matrices = weights.index_select(0, batch.adapters).reshape(-1, *shape).to(dtype)
        padded = inputs.index_select(0, batch.padded.flatten()).to(dtype).unflatten(0, batch.padded.shape)
        product = torch.bmm(padded, matrices.transpose(1, 2)).flatten(0, 1).index_select(0, batch.places)
        if batch.has_all_rows:
            output.add_(product, alpha=scaling)
        else:
            output.index_add_(0, batch.rows, product, alpha=scaling)


class _Batch(NamedTuple):
    """The rows of each adapter, filled up to as many as the one with the most has."""

    adapters: torch.Tensor  # [S]
    padded: torch.Tensor  # [S, n] rows
    rows: torch.Tensor  # [R] those with an adapter, in order
    places: torch.Tensor  # [R] where each stands in S * n
    has_all_rows: bool


@lru_cache(maxsize=16)
def _batches(indices: bytes) -> list[_Batch]:
    """Every layer of a step asks for the same. indices: [T] int64, each row's adapter, or -1."""
    of_rows = np.frombuffer(indices, np.int64)
    adapters, counts = np.unique(of_rows[of_rows >= 0], return_counts=True)
    if len(adapters) * counts.max(initial=0) <= 2 * len(of_rows):
        return [_batch(of_rows, adapters)] if len(adapters) else []
    sizes = np.frexp(counts)[1]  # of a prefill, say: none is filled up to more than twice its rows
    return [_batch(of_rows, adapters[sizes == size]) for size in np.unique(sizes)]


def _batch(of_rows: np.ndarray, adapters: np.ndarray) -> _Batch:
    rows = np.flatnonzero(np.isin(of_rows, adapters))
    numbers = np.searchsorted(adapters, of_rows[rows])
    counts = np.bincount(numbers)
    order = np.argsort(numbers, kind="stable")
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    padded = np.zeros((len(adapters), counts.max()), np.int64)
    padded[numbers[order], within] = rows[order]
    places = np.empty(len(rows), np.int64)
    places[order] = numbers[order] * counts.max() + within
    tensor = torch.from_numpy
    has_all_rows = len(rows) == len(of_rows)
    return _Batch(tensor(adapters), tensor(padded), tensor(rows), tensor(places), has_all_rows)
