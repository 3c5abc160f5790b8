"""Causal attention over the trees of a packed row (see MicroBatch).

On a CPU by `blockwise_attention.py`; on a GPU by torch's SDPA, in fp32 or under context parallelism.
`gpu_attention.py` has the rest.
B batch (1), L tokens of a row, l tokens of this process, N heads, H head size, n sequences of a bucket.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

import rl.models.platform  # noqa: F401  sets torchtitan's device first
from rl.models.blockwise_attention import Bucket, PackedDocuments, blocks, blockwise_attention
from rl.models.cuda import expands_heads

from torchtitan.models.common.attention import FlexAttention

T = TypeVar("T")
_LENGTH_STEP = 32
"""Paths are padded to the longest of their bucket; a bucket holds lengths of one multiple of this."""
_BRANCH_STEP = 8
"""The same of branches' own tokens."""


def stretches(positions: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The tree of a row, depth first: where each run of consecutive positions starts, and its path [p].

    The path ends with the run; the earlier tokens on it are its ancestors.
    """
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    path = np.arange(0)
    for first, end in zip(starts.tolist(), [*starts[1:].tolist(), len(positions)], strict=True):
        path = np.concatenate([path[: positions[first]], np.arange(first, end)])
        yield first, path


def row_pieces(num_tokens: int, num_procs: int) -> list[np.ndarray]:
    """The tokens of a row that each process of a context-parallel group holds, [l] each, in ascending order.

    One piece from the front and one from the back: later tokens attend to more. The row is divisible
    (EngineConfig.row_multiple).
    """
    if num_procs == 1:
        return [np.arange(num_tokens)]
    pieces = np.arange(num_tokens).reshape(2 * num_procs, -1)
    return [np.concatenate([pieces[i], pieces[-1 - i]]) for i in range(num_procs)]


def pack_documents(
    positions: np.ndarray,
    device: torch.device,
    pieces: Sequence[np.ndarray] | None = None,
    rank: int = 0,
) -> PackedDocuments:
    """positions: [L], of a MicroBatch. pieces: `row_pieces` of the context-parallel group, if any."""
    pieces = pieces or row_pieces(len(positions), 1)
    gathered_at = np.argsort(np.concatenate(pieces))  # where token t of the row lies in the gathered keys
    local_at = np.full(len(positions), -1)
    local_at[pieces[rank]] = np.arange(len(pieces[rank]))
    runs: list[tuple[np.ndarray, np.ndarray]] = []  # own tokens, and the path that they end
    for first, path in stretches(positions):
        for start, end in _ranges(pieces[rank]):
            indices = np.arange(max(first, start), min(path[-1] + 1, end))
            if len(indices):
                runs.append((indices, path[: positions[indices[-1]] + 1]))
    buckets = []
    restore = np.zeros(len(pieces[rank]), int)
    num_computed = 0  # queries of the buckets so far, with padding
    for bucket in _buckets(runs, _size_class):
        (own, is_there), (paths, _) = (
            _padded([own for own, _ in bucket]),
            _padded([path for _, path in bucket]),
        )
        arrays = local_at[own], gathered_at[paths], positions[own], is_there
        queries, keys, last, real = (torch.from_numpy(array).to(device) for array in arrays)
        buckets.append(Bucket(queries, keys, last, real, blocks(positions[own])))
        restore[local_at[own[is_there]]] = num_computed + np.flatnonzero(is_there)
        num_computed += own.size
    return PackedDocuments(tuple(buckets), torch.from_numpy(restore).to(device))


def _size_class(run: tuple[np.ndarray, np.ndarray]) -> tuple[int, int]:
    """Runs of one class are a bucket: sequences that start here, or branches."""
    own, path = map(len, run)
    return (0 if own == path else -(-own // _BRANCH_STEP)), -(-path // _LENGTH_STEP)


def _ranges(ascending: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of consecutive numbers."""
    breaks = np.flatnonzero(np.diff(ascending, prepend=-2) != 1)
    lasts = ascending[[*(breaks[1:] - 1), -1]]
    return list(zip(ascending[breaks].tolist(), (lasts + 1).tolist(), strict=True))


def _buckets(items: Sequence[T], size_of: Callable[[T], Any]) -> list[list[T]]:
    """Those of one size together, smaller ones first."""
    return [list(bucket) for _, bucket in groupby(sorted(items, key=size_of), key=size_of)]


def _padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """[n, longest], each row filled up with its last element; and where that was not."""
    lengths = np.array([len(row) for row in rows])
    offsets = np.arange(lengths.max())
    return np.stack([row[np.minimum(offsets, len(row) - 1)] for row in rows]), offsets < lengths[:, None]


def packed_attention(
    q_lNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    documents: PackedDocuments,
    scale: float | None,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """[l, N, H] and keys, values [L, N', H], where N' divides N -> [l, N, H].

    window: how many tokens before a query it sees, itself included; None for all.
    """
    if q_lNH.device.type == "cpu" and not dropout:
        scale = q_lNH.shape[-1] ** -0.5 if scale is None else scale
        return blockwise_attention(q_lNH, k_LNH, v_LNH, documents, scale, window)
    return _by_sdpa(q_lNH, k_LNH, v_LNH, documents, scale, window, dropout)


def _by_sdpa(
    q_lNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    documents: PackedDocuments,
    scale: float | None,
    window: int | None,
    dropout: float,
) -> torch.Tensor:
    outputs, dtype = [], q_lNH.dtype
    if dtype.itemsize < 4 and documents.has_branches and k_LNH.requires_grad:
        # The gradient of a prefix's token is a sum over its branches, of which 16 bits would lose the small.
        k_LNH, v_LNH = k_LNH.float(), v_LNH.float()
    for bucket in documents.buckets:
        q, k, v = _rows(q_lNH, bucket.queries), _rows(k_LNH, bucket.keys), _rows(v_LNH, bucket.keys)
        k, v = k.to(dtype), v.to(dtype)
        mask = _mask(bucket, window)
        if mask is not None or expands_heads(q.device.type, q.dtype):
            k, v = (_for_each_head(t, q) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, documents.restore)


def _mask(bucket: Bucket, window: int | None) -> torch.Tensor | CausalBias | None:
    """[n, 1, q, k] bool: which keys a query sees. None: causal, since padding follows all else."""
    (num_queries, num_keys), num_rows = (bucket.queries.shape[1], bucket.keys.shape[1]), len(bucket.queries)
    if window is None or num_keys <= window:
        if num_queries == num_keys:
            return None
        if num_rows == 1:
            return _lower_right_bias(num_queries, num_keys)
    last, at = bucket.last[:, None, :, None], torch.arange(num_keys, device=bucket.last.device)
    seen = at <= last
    return seen if window is None else seen & (at > last - window)


def _lower_right_bias(num_queries: int, num_keys: int) -> CausalBias:
    """A mask that takes no memory. torch cannot make one while a dispatch mode looks on (checkpointing's)."""
    with _disable_current_modes():
        return causal_lower_right(num_queries, num_keys)


def _for_each_head(keys_or_values: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[n, N', k, H] -> [n, N, k, H]"""
    groups = q.shape[1] // keys_or_values.shape[1]
    return keys_or_values.repeat_interleave(groups, dim=1) if groups > 1 else keys_or_values


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[*, N, H] at [n, longest] -> [n, N, longest, H]"""
    return tensor.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


class PackedAttention(FlexAttention):
    """A FlexAttention: under context parallelism torchtitan gathers the keys and values of those."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: PackedDocuments,
        scale: float | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        return packed_attention(q_BLNH[0], k_BLNH[0], v_BLNH[0], attention_masks, scale).unsqueeze(0)
