"""Causal attention over the trees of a packed row (see MicroBatch) through torch's SDPA.

It is used on a CPU, in fp32 on a GPU, and under context parallelism; `gpu_attention.py` has the rest.
B batch (1), L tokens of a row, l tokens of this process, N heads, H head size, n sequences of a bucket.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

import rl.models.platform  # noqa: F401  sets torchtitan's device first
from rl.models.cuda import expands_heads
from rl.models.fan_attention import Fan, fan_attention

from torchtitan.models.common.attention import FlexAttention

T = TypeVar("T")
_LENGTH_STEP = 32
"""Documents are padded to the longest of their bucket; a bucket holds lengths of one multiple of this."""
_BRANCH_STEP = 8
"""The same of branches' own tokens."""
_MATMUL_QUERIES = 64
"""Branches of at most so many own tokens are fastest by matmuls."""
_FAN_PATHS = 512, 2048
"""Siblings are a fan if their path has so many tokens: the second if their mean is at most _MATMUL_QUERIES."""


class Branches(NamedTuple):
    """What goes on after tokens that stand elsewhere: n of similar lengths, q tokens of each their own."""

    queries: torch.Tensor  # [n, q] indices into l
    keys: torch.Tensor  # [n, k] indices into L: the whole path
    # [n, 1, q, k] bool: which keys a query sees. Of one alone (n = 1) the last query sees all.
    mask: torch.Tensor | CausalBias


class PackedDocuments(NamedTuple):
    """Where the tokens of a row lie: documents that start here, by similar length, and branches."""

    # One [n, longest] index into l for each bucket; padding repeats the last token.
    queries: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]  # the same tokens as indices into L as it was gathered
    branches: tuple[Branches, ...]
    fans: tuple[Fan, ...]
    restore: torch.Tensor  # [l] index into all that is above, one after the other, padding included


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
    fans: bool = False,
) -> PackedDocuments:
    """positions: [L], of a MicroBatch. pieces: `row_pieces` of the context-parallel group, if any.

    fans: branches of a long path may be computed together, which is faster on a CPU; not with a window.
    """
    pieces = pieces or row_pieces(len(positions), 1)
    gathered_at = np.argsort(np.concatenate(pieces))  # where token t of the row lies in the gathered keys
    local_at = np.full(len(positions), -1)
    local_at[pieces[rank]] = np.arange(len(pieces[rank]))
    whole: list[np.ndarray] = []
    branches: list[tuple[np.ndarray, np.ndarray]] = []  # own tokens, and the path that they end
    for first, path in stretches(positions):
        for start, end in _ranges(pieces[rank]):
            here = np.arange(max(first, start), min(path[-1] + 1, end))
            if len(here):
                seen = path[: positions[here[-1]] + 1]
                if len(seen) > len(here):
                    branches.append((here, seen))
                else:
                    whole.append(here)
    queries, keys, of_branches = [], [], []
    restore = np.zeros(len(pieces[rank]), int)
    num_computed = 0  # tokens of the buckets so far, with padding

    def indices(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    for those in _buckets(whole, lambda document: -(-len(document) // _LENGTH_STEP)):
        tokens, is_there = _padded(those)
        queries.append(indices(local_at[tokens]))
        keys.append(indices(gathered_at[tokens]))
        restore[local_at[tokens[is_there]]] = num_computed + np.flatnonzero(is_there)
        num_computed += tokens.size
    branches, of_fans = _without_fans(branches) if fans and device.type == "cpu" else (branches, [])
    for pairs in _buckets(branches, lambda b: (-(-len(b[0]) // _BRANCH_STEP), -(-len(b[1]) // _LENGTH_STEP))):
        (own, is_own), (paths, _) = _padded([own for own, _ in pairs]), _padded([path for _, path in pairs])
        if len(pairs) > 1:
            mask = indices(np.arange(paths.shape[1]) <= positions[own][:, None, :, None])
        else:
            mask = _lower_right_bias(own.shape[1], paths.shape[1])
        of_branches.append(Branches(indices(local_at[own]), indices(gathered_at[paths]), mask))
        restore[local_at[own[is_own]]] = num_computed + np.flatnonzero(is_own)
        num_computed += own.size
    made_fans = []
    for path, siblings in of_fans:
        tokens = np.concatenate(siblings)
        starts = np.cumsum([0, *map(len, siblings)])
        rows = [np.arange(start, start + len(own)) for start, own in zip(starts, siblings, strict=False)]
        buckets = [_padded(those) for those in _buckets(rows, lambda row: -(-len(row) // _LENGTH_STEP))]
        its_rows, no_padding = (tuple(map(indices, column)) for column in zip(*buckets, strict=True))
        own_at, path_at = indices(gathered_at[tokens]), indices(gathered_at[path])
        made_fans.append(Fan(indices(local_at[tokens]), own_at, path_at, its_rows, no_padding))
        restore[local_at[tokens]] = num_computed + np.arange(len(tokens))
        num_computed += len(tokens)
    made = tuple(queries), tuple(keys), tuple(of_branches), tuple(made_fans)
    return PackedDocuments(*made, indices(restore))


def _without_fans(
    branches: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[tuple[np.ndarray, list[np.ndarray]]]]:
    """Branches of short paths; and long paths, each with the own tokens of all that goes on after it."""
    left, fans, siblings = [], [], dict[int, list[tuple[np.ndarray, np.ndarray]]]()
    for own, seen in branches:
        siblings.setdefault(int(seen[-len(own) - 1]), []).append((own, seen))
    for those in siblings.values():
        path, owns = those[0][1][: -len(those[0][0])], [own for own, _ in those]
        if len(path) >= _FAN_PATHS[sum(map(len, owns)) <= _MATMUL_QUERIES * len(owns)]:
            fans.append((path, owns))
        else:
            left += those
    return left, fans


def _lower_right_bias(num_queries: int, num_keys: int) -> CausalBias:
    """A mask that takes no memory. torch cannot make one while a dispatch mode looks on (checkpointing's)."""
    with _disable_current_modes():
        return causal_lower_right(num_queries, num_keys)


def _ranges(ascending: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of consecutive numbers."""
    breaks = np.flatnonzero(np.diff(ascending, prepend=-2) != 1)
    lasts = ascending[[*(breaks[1:] - 1), -1]]
    return list(zip(ascending[breaks].tolist(), (lasts + 1).tolist(), strict=True))


def _buckets(items: Sequence[T], size_of: Callable[[T], Any]) -> list[list[T]]:
    """Those of one size together, smaller ones first."""
    return [list(those) for _, those in groupby(sorted(items, key=size_of), key=size_of)]


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
    outputs = []
    # Padding needs no mask of its own: it follows a document's tokens, which attend only backwards.
    whole = zip(documents.queries, documents.keys, (None,) * len(documents.keys), strict=True)
    for queries, keys, mask in (*whole, *documents.branches):
        q, k, v = (_rows(t, index) for t, index in ((q_lNH, queries), (k_LNH, keys), (v_LNH, keys)))
        if window is not None and k.shape[2] > window:
            mask = _windowed(None if isinstance(mask, CausalBias) else mask, q, k, window)
        outputs.append(_attend(q, k, v, mask, scale, dropout).transpose(1, 2).flatten(0, 1))
    outputs += [fan_attention(q_lNH, k_LNH, v_LNH, fan, scale) for fan in documents.fans]
    return torch.cat(outputs).index_select(0, documents.restore)


def _windowed(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, window: int) -> torch.Tensor:
    """Without the keys that lie too far back. Keys are a path: a query that sees m has position m - 1."""
    if mask is None:
        mask = _lower_right(q, k)
    return mask & (torch.arange(k.shape[2], device=q.device) >= mask.sum(-1, keepdim=True) - window)


def _lower_right(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[1, 1, q, k]: the last query sees all keys, and each one before one key less."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
    return ones.tril(num_keys - num_queries)[None, None]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | CausalBias | None,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """[n, N, q, H], [n, N', k, H] -> [n, N, q, H]. mask: [n, 1, q, k]; without one causal, and q = k."""
    if not dropout and matmul_is_faster(q, k, mask is None):
        return _by_matmul(q, k, v, mask, scale)
    if mask is not None or expands_heads(q.device.type, q.dtype):
        k, v = (_for_each_head(t, q) for t in (k, v))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )


def matmul_is_faster(q: torch.Tensor, k: torch.Tensor, causal: bool) -> bool:
    """Whether plain matmuls beat torch's flash attention, which on a CPU is slow where rows are short.

    Measured, forward and backward: docs/attention.md. A document alone stays with flash.
    """
    if q.device.type != "cpu" or len(q) == 1:
        return False
    if causal:
        return q.dtype == torch.bfloat16 and k.shape[2] <= 128
    return q.shape[2] <= _MATMUL_QUERIES


def _by_matmul(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | CausalBias | None,
    scale: float | None,
) -> torch.Tensor:
    """In fp32, which for so few tokens costs little."""
    (n, num_heads, num_queries, size), num_kv_heads = q.shape, k.shape[1]
    if mask is None or isinstance(mask, CausalBias):
        mask = _lower_right(q, k)
    scaled = q.float() * (size**-0.5 if scale is None else scale)
    grouped = scaled.reshape(n, num_kv_heads, -1, size)  # heads that share their keys, one after the other
    scores = (grouped @ k.float().transpose(-1, -2)).unflatten(2, (-1, num_queries))
    weights = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1).flatten(2, 3)
    return (weights @ v.float()).reshape(n, num_heads, num_queries, size).to(v.dtype)


def _for_each_head(keys_or_values: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[n, N', k, H] -> [n, N, k, H]"""
    groups = q.shape[1] // keys_or_values.shape[1]
    return keys_or_values.repeat_interleave(groups, dim=1) if groups > 1 else keys_or_values


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[*, N, H] at [n, longest] -> [n, N, longest, H]"""
    return tensor.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


class PackedSDPA(FlexAttention):
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
