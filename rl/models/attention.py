"""Causal attention over packed documents through torch's SDPA.

It is used on a CPU, in fp32 on a GPU, and under context parallelism: torchtitan's varlen attention has no CPU
kernel, computes only in bf16 and has no context parallelism; its flex attention has no backward on a CPU.
B batch (1), L tokens of a row, l tokens of this process, N heads, H head size, n documents of a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import rl.models.platform  # noqa: F401  sets torchtitan's device first

from torchtitan.models.common.attention import FlexAttention

_LENGTH_STEP = 32
"""Documents are padded to the longest of their bucket; a bucket holds lengths of one multiple of this."""


class Fragment(NamedTuple):
    """The later part of a document, whose queries see keys of other processes."""

    queries: torch.Tensor  # [q] indices into l
    keys: torch.Tensor  # [k] indices into L as it was gathered: the document up to the last query


class PackedDocuments(NamedTuple):
    """Where the documents of a row lie: those that start here, by similar length, and the fragments."""

    # One [n, longest] index into l for each bucket; padding repeats the last token.
    queries: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]  # the same tokens as indices into L as it was gathered
    valid: tuple[torch.Tensor, ...]  # one [n * longest] bool for each bucket
    fragments: tuple[Fragment, ...]
    restore: torch.Tensor  # [l] index into the concatenated valid tokens of all buckets and fragments


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
    positions: np.ndarray, device: torch.device, pieces: Sequence[np.ndarray] | None = None, rank: int = 0
) -> PackedDocuments:
    """positions: [L], of a MicroBatch. pieces: `row_pieces` of the group, if any; then nothing is shared.

    A document that shares leading tokens with the one before is computed whole, and only what follows them
    is kept.
    """
    pieces = pieces or row_pieces(len(positions), 1)
    gathered_at = np.argsort(np.concatenate(pieces))  # where token t of the row lies in the gathered keys
    local_at = np.full(len(positions), -1)
    local_at[pieces[rank]] = np.arange(len(pieces[rank]))
    whole, shared, fragments, order = [], [], [], []
    path = np.arange(0)  # where the tokens of the document before lie
    for first, last in _runs(pieces[rank], positions):
        here, before = np.arange(first, last), int(positions[first])
        if before == 0 or len(pieces) == 1:
            path = np.concatenate([path[:before], here])
            whole.append(path)
            shared.append(before)
        else:
            fragments.append((here, np.arange(first - before, last)))
    lengths = np.array([len(document) for document in whole], int)
    bucket_of = -(-lengths // _LENGTH_STEP)
    queries, keys, valid = [], [], []

    def indices(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    for bucket in np.unique(bucket_of):
        chosen = np.flatnonzero(bucket_of == bucket)
        longest = int(lengths[chosen].max())
        offsets = np.arange(longest)[None, :]
        first_kept = np.array([shared[d] for d in chosen])[:, None]
        is_valid = (offsets >= first_kept) & (offsets < lengths[chosen, None])
        tokens = np.stack([np.pad(whole[d], (0, longest - len(whole[d])), "edge") for d in chosen])
        queries.append(indices(local_at[tokens]))
        keys.append(indices(gathered_at[tokens]))
        valid.append(indices(is_valid.ravel()))
        order.append(local_at[tokens[is_valid]])
    order += [local_at[tokens] for tokens, _ in fragments]
    return PackedDocuments(
        tuple(queries),
        tuple(keys),
        tuple(valid),
        tuple(Fragment(indices(local_at[q]), indices(gathered_at[k])) for q, k in fragments),
        indices(np.argsort(np.concatenate(order))),
    )


def document_rows(tokens: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed [L] -> right-padded rows: tokens and positions [n, longest].

    Third comes where each token went: [L] indices into n * longest. Padding follows a document and repeats
    its last token: causal models never see it.
    """
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff([*starts, len(positions)])
    offsets = np.minimum(np.arange(lengths.max())[None, :], lengths[:, None] - 1)
    rows = np.repeat(np.arange(len(starts)), lengths)
    return tokens[starts[:, None] + offsets], offsets, rows * lengths.max() + positions


def _runs(tokens: np.ndarray, positions: np.ndarray) -> list[tuple[int, int]]:
    """Longest ranges [first, last) of adjacent tokens of one document, in a sorted subset of a row."""
    at = positions[tokens]
    apart = (np.diff(tokens, prepend=tokens[0] - 2) != 1) | (np.diff(at, prepend=at[0] - 2) != 1)
    breaks = np.flatnonzero(apart)
    ends = [*breaks[1:], len(tokens)]
    return [(int(tokens[a]), int(tokens[b - 1]) + 1) for a, b in zip(breaks, ends, strict=True)]


def packed_attention(
    q_lNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    documents: PackedDocuments,
    scale: float | None,
) -> torch.Tensor:
    """[l, N, H] and keys, values [L, N', H], where N' divides N -> [l, N, H]."""
    gqa = q_lNH.shape[1] != k_LNH.shape[1]
    outputs = []
    for queries, keys, valid in zip(documents.queries, documents.keys, documents.valid, strict=True):
        # Padding needs no mask: it follows a document's tokens, which attend only backwards.
        q, k, v = (_rows(t, index) for t, index in ((q_lNH, queries), (k_LNH, keys), (v_LNH, keys)))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
        outputs.append(out.transpose(1, 2).flatten(0, 1)[valid])
    for queries, keys in documents.fragments:
        q, k, v = (_rows(t, index[None]) for t, index in ((q_lNH, queries), (k_LNH, keys), (v_LNH, keys)))
        if gqa:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        mask = causal_lower_right(q.shape[2], k.shape[2])  # the last query sees the last key
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs).index_select(0, documents.restore)


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
