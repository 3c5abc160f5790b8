"""Attention of siblings that go on after one long path, on a CPU: their keys stand in memory once.

Softmax over a path and over a sibling's own tokens is computed apart, by torch's flash kernel, and put
together by their log-sum-exp. So is the gradient: the kernel's backward pass takes the whole's, as in ring
attention.
C chunks of queries, m queries, k keys, N heads, N' heads of keys, H head size.
"""

from typing import Any, NamedTuple

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CHUNKS = 4  # the kernel's backward pass has a thread for each chunk and head
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Fan(NamedTuple):
    """Siblings: what goes on after the same tokens. m: their own, one sibling after the other."""

    queries: torch.Tensor  # [m] indices into this process's tokens
    own: torch.Tensor  # [m] the same tokens as indices into the whole row
    path: torch.Tensor  # [k] indices into the whole row: what all of them see
    siblings: tuple[torch.Tensor, ...]  # [n, longest] indices into m; padding repeats a sibling's last token
    is_there: tuple[torch.Tensor, ...]  # [n, longest] bool: what is no padding


def fan_attention(
    q_lNH: torch.Tensor, k_LNH: torch.Tensor, v_LNH: torch.Tensor, fan: Fan, scale: float | None
) -> torch.Tensor:
    """[l, N, H] and keys, values [L, N', H], where N' divides N -> [m, N, H]."""
    own, path = ([t.index_select(0, index) for t in (k_LNH, v_LNH)] for index in (fan.own, fan.path))
    return _FanAttention.apply(q_lNH.index_select(0, fan.queries), *own, *path, fan, scale)


class _FanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k_own: torch.Tensor,
        v_own: torch.Tensor,
        k_path: torch.Tensor,
        v_path: torch.Tensor,
        fan: Fan,
        scale: float | None,
    ) -> torch.Tensor:
        groups, size = q.shape[1] // k_own.shape[1], len(q)
        found = _flash(_folded(q, groups), *map(_for_each_chunk, (k_path, v_path)), scale=scale)
        on_path, sum_on_path = _unfolded(found[0], groups, size), _unfolded(found[1][..., None], groups, size)
        on_path = on_path.float()
        own, sum_own = torch.empty_like(on_path), torch.empty_like(sum_on_path)
        for rows, is_there in zip(fan.siblings, fan.is_there, strict=True):
            out, sums = _flash(*_siblings(rows, groups, q, k_own, v_own), is_causal=True, scale=scale)
            own[rows[is_there]] = out.transpose(1, 2)[is_there].float()
            sum_own[rows[is_there]] = sums[..., None].transpose(1, 2)[is_there]
        sums = torch.logaddexp(sum_on_path, sum_own)
        merged = on_path * (sum_on_path - sums).exp() + own * (sum_own - sums).exp()
        ctx.save_for_backward(q, k_own, v_own, k_path, v_path, merged.to(q.dtype), sums)
        ctx.fan, ctx.scale, ctx.groups = fan, scale, groups
        return merged.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k_own, v_own, k_path, v_path, out, sums = ctx.saved_tensors
        groups, scale = ctx.groups, ctx.scale
        folded = [_folded(t, groups) for t in (grad, q, out, sums)]
        dq_path, dk_path, dv_path = _flash_backward(
            folded[0], folded[1], *map(_for_each_chunk, (k_path, v_path)),
            folded[2], folded[3][..., 0], 0.0, False, scale=scale,
        )  # fmt: skip
        dq = _unfolded(dq_path, groups, len(q)).float()
        dk, dv = torch.zeros_like(k_own, dtype=torch.float32), torch.zeros_like(v_own, dtype=torch.float32)
        for rows, is_there in zip(ctx.fan.siblings, ctx.fan.is_there, strict=True):
            its_grad, its_q, its_out, its_sums = (
                t[rows].transpose(1, 2).contiguous() for t in (grad, q, out, sums)
            )
            its_grad *= is_there[:, None, :, None]  # padding
            _, its_k, its_v = _siblings(rows, groups, q, k_own, v_own)
            found = _flash_backward(
                its_grad, its_q, its_k, its_v, its_out, its_sums[..., 0], 0.0, True, scale=scale
            )
            for whole, part in zip((dq, dk, dv), found, strict=True):
                part = part.transpose(1, 2)[is_there].float()
                whole[rows[is_there]] += part.unflatten(1, (whole.shape[1], -1)).sum(2)
        paths = (t.sum(0).transpose(0, 1) for t in (dk_path, dv_path))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), *paths, None, None


def _for_each_chunk(t: torch.Tensor) -> torch.Tensor:
    """[k, N', H] -> [C, N', k, H], in memory once"""
    return t.transpose(0, 1).expand(_CHUNKS, -1, -1, -1)


def _folded(t: torch.Tensor, groups: int) -> torch.Tensor:
    """[m, N, H] -> [C, N', m * groups / C, H]: without a mask, heads that share their keys are more queries.

    m is filled up with zeros, whose gradient is zero.
    """
    chunks = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, -len(t) % _CHUNKS)).unflatten(0, (_CHUNKS, -1))
    return chunks.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3).contiguous()


def _unfolded(t: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """[C, N', m * groups / C, H] -> [m, N, H]"""
    return t.unflatten(2, (-1, groups)).transpose(1, 2).flatten(2, 3).flatten(0, 1)[:size]


def _siblings(
    rows: torch.Tensor, groups: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """[m, *, H] -> [n, N, longest, H] each."""
    expanded = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (k, v))
    return tuple(t[rows].transpose(1, 2).contiguous() for t in (q, *expanded))
