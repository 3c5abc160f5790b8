"""Causal attention of packed rows on a CPU: matmuls over blocks of queries, forward and backward.

As in flash attention the weights never stand in memory as a whole: those of a block are computed again for
the gradient. Why not torch's own kernel: docs/attention.md.
l queries, L keys, n rows of q queries and k keys, N heads, M heads of keys, G = N / M, H head size, c queries
of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

_BLOCK = 64


class Block(NamedTuple):
    """A bucket's queries from start to end. Each sees `every` keys or more, and none more than `last_key`."""

    start: int
    end: int
    every: int
    last_key: int


class Bucket(NamedTuple):
    """n sequences of similar lengths, or n branches of such."""

    queries: torch.Tensor  # [n, q] indices into l; padding repeats the last token
    keys: torch.Tensor  # [n, k] indices into L: the whole path, which ends with the queries
    last: torch.Tensor  # [n, q] which of its row's keys is the last that a query sees: itself
    is_there: torch.Tensor  # [n, q] bool: what is no padding
    blocks: tuple[Block, ...]


class _Heads(NamedTuple):
    """A bucket's tokens, each of which lies in M rows, one for each head of keys."""

    queries: torch.Tensor  # [n * M * q] indices into l * M
    keys: torch.Tensor  # [n * M * k] indices into L * M
    padding: torch.Tensor  # [n * M * q, 1] bool


@dataclass
class PackedDocuments:
    """Where the tokens of a row lie."""

    buckets: tuple[Bucket, ...]
    restore: torch.Tensor  # [l] index into the buckets' queries, one after the other, padding included
    _of_heads: dict[int, tuple[list[_Heads], torch.Tensor]] = field(default_factory=dict)

    @property
    def has_branches(self) -> bool:
        """Whether some tokens are keys of several rows."""
        return any(bucket.keys.shape[1] > bucket.queries.shape[1] for bucket in self.buckets)

    def of_heads(self, num_heads: int) -> tuple[list[_Heads], torch.Tensor]:
        """M -> each bucket's tokens; and [l * M] index into their queries, as `restore`. For all layers."""
        if num_heads not in self._of_heads:
            blocks = []
            head = torch.arange(num_heads)[None, :, None]
            for bucket in self.buckets:
                queries, keys = (index[:, None] * num_heads + head for index in (bucket.queries, bucket.keys))
                padding = ~bucket.is_there[:, None].expand(queries.shape)
                blocks.append(_Heads(queries.flatten(), keys.flatten(), padding.reshape(-1, 1)))
            order = torch.cat([heads.queries for heads in blocks])
            at, restore = torch.arange(len(order)), order.new_empty(len(self.restore) * num_heads)
            # A token's padding comes after it.
            restore.scatter_reduce_(0, order, at, "amin", include_self=False)
            self._of_heads[num_heads] = blocks, restore
        return self._of_heads[num_heads]


def blocks(last: np.ndarray) -> tuple[Block, ...]:
    """last: as a Bucket's."""
    length = last.shape[1]
    size = -(-length // -(-length // _BLOCK))  # as equal as can be
    bounds = [(start, min(start + size, length)) for start in range(0, length, size)]
    return tuple(Block(a, b, int(last[:, a].min()) + 1, int(last[:, b - 1].max()) + 1) for a, b in bounds)


def blockwise_attention(
    q_lNH: torch.Tensor,
    k_LMH: torch.Tensor,
    v_LMH: torch.Tensor,
    documents: PackedDocuments,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """-> [l, N, H]"""
    return _Blockwise.apply(q_lNH, k_LMH, v_LMH, documents, scale, window)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: PackedDocuments,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        outputs = []
        of_heads, restore = documents.of_heads(k.shape[1])
        for bucket, heads in zip(documents.buckets, of_heads, strict=True):
            rows_q, rows_k, rows_v = _rows(bucket, heads, q, k, v)
            out = rows_v.new_empty(*rows_q.shape[:2], v.shape[-1])
            for block, seen, weights in _weights(bucket, rows_q, rows_k, scale, window):
                out[:, block] = weights.to(v.dtype) @ rows_v[:, seen]
            outputs.append(out.view(len(heads.queries), -1))
        ctx.save_for_backward(q, k, v)
        ctx.documents, ctx.scale, ctx.window = documents, scale, window
        return torch.cat(outputs).index_select(0, restore).view(*q.shape[:2], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        num_heads = k.shape[1]
        of_heads, restore = ctx.documents.of_heads(num_heads)
        grad = grad.reshape(len(q) * num_heads, -1)
        dk, dv = (torch.zeros(len(t) * num_heads, t.shape[-1]) for t in (k, v))
        dq = []
        for bucket, heads in zip(ctx.documents.buckets, of_heads, strict=True):
            rows_q, rows_k, rows_v = _rows(bucket, heads, q, k, v)
            rows_grad = grad.index_select(0, heads.queries).masked_fill_(heads.padding, 0)
            rows_grad = rows_grad.view(*rows_q.shape[:2], -1)
            values = rows_v.float().transpose(1, 2)
            rows_dq = torch.empty_like(rows_q)
            rows_dk, rows_dv = (torch.zeros_like(t, dtype=torch.float32) for t in (rows_k, rows_v))
            for block, seen, weights in _weights(bucket, rows_q, rows_k, ctx.scale, ctx.window):
                its_grad = rows_grad[:, block]
                rows_dv[:, seen] += weights.to(v.dtype).transpose(1, 2) @ its_grad
                dweights = its_grad.float() @ values[..., seen]
                dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype).to(k.dtype)
                rows_dq[:, block] = dscores @ rows_k[:, seen]
                rows_dk[:, seen] += dscores.transpose(1, 2) @ rows_q[:, block]
            dq.append(rows_dq.view(len(heads.queries), -1))
            for whole, part in ((dk, rows_dk), (dv, rows_dv)):
                whole.index_add_(0, heads.keys, part.flatten(0, 1))
        grad_q = torch.cat(dq).index_select(0, restore).view(q.shape).mul_(ctx.scale)
        grad_k = dk.mul_(ctx.scale).view(k.shape).to(k.dtype)
        return grad_q, grad_k, dv.view(v.shape).to(v.dtype), None, None, None


def _rows(
    bucket: Bucket, heads: _Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """[n * M, q * G, H]: query heads that share their keys are more queries; and [n * M, k, H] twice."""
    num_heads = k.shape[1]
    num_rows = len(bucket.queries) * num_heads
    queries = q.reshape(len(q) * num_heads, -1).index_select(0, heads.queries)
    its_k, its_v = (t.reshape(-1, t.shape[-1]).index_select(0, heads.keys) for t in (k, v))
    rows_k, rows_v = (t.view(num_rows, -1, t.shape[-1]) for t in (its_k, its_v))
    return queries.view(num_rows, -1, q.shape[-1]), rows_k, rows_v


def _weights(
    bucket: Bucket, q: torch.Tensor, k: torch.Tensor, scale: float, window: int | None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Of each block: which of the q * G it has, which keys, and [n * M, c * G, keys] fp32."""
    groups = q.shape[1] // bucket.queries.shape[1]
    q, keys = q.float() * scale, k.float().transpose(1, 2)
    for start, end, every, last_key in bucket.blocks:
        block = slice(start * groups, end * groups)
        first = 0 if window is None else max(0, every - window)
        sure = every if window is None else first  # every query sees the keys from first to here
        scores = q[:, block] @ keys[..., first:last_key]
        last, at = bucket.last[:, None, start:end, None, None], torch.arange(sure, last_key)
        hidden = at > last if window is None else (at > last) | (at <= last - window)
        by_query = scores.view(len(bucket.queries), -1, end - start, groups, last_key - first)
        by_query[..., sure - first :].masked_fill_(hidden, -torch.inf)
        yield block, slice(first, last_key), scores.softmax(-1)
