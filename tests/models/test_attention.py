"""Packed attention: every way to compute it gives the same, and equals attention over each sequence alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl.models import attention
from rl.models.attention import pack_documents, packed_attention, row_pieces
from tests.numeric import assert_close_as, float64

CPU = torch.device("cpu")


def inputs(num_tokens, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(num_tokens, heads, 16, dtype=dtype, requires_grad=True) for heads in (6, 2, 2)]


def in_float64(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def paths(positions):
    """Where the tokens of each sequence of a row lie."""
    found, path = [], []
    for at, position in enumerate(positions):
        if position == 0 or position != positions[at - 1] + 1:
            path = path[:position]
            found.append(None)
        path = [*path, at]
        found[-1] = path
    return found


PACKED = np.concatenate([np.arange(n) for n in (5, 40, 3, 37, 300)])
TREES = np.concatenate(
    [np.arange(a, b) for a, b in [(0, 40), (33, 38), (33, 50), (20, 22), (21, 90), (0, 7), (7, 8)]]
)


@pytest.mark.parametrize("positions", [PACKED, TREES], ids=["packed", "trees"])
def test_each_token_attends_to_its_own_sequence_up_to_itself(positions):
    q, k, v = inputs(len(positions))
    got = packed_attention(q, k, v, pack_documents(positions, CPU), None)
    seen = set()
    for path in paths(positions):
        reference, exact = (
            F.scaled_dot_product_attention(
                *(t[path].transpose(0, 1)[None] for t in of), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for of in ((q, k, v), in_float64((q, k, v)))
        )
        assert_close_as(reference, got[path], exact)
        seen |= set(path)
    assert seen == set(range(len(positions)))


@pytest.mark.parametrize("positions", [PACKED, TREES], ids=["packed", "trees"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale, window", [(None, None), (0.3, None), (None, 9), (0.3, 70)])
def test_blocks_and_sdpa_and_repeated_heads_give_the_same(monkeypatch, positions, dtype, scale, window):
    """Outputs and gradients; values may be of another size than keys. SDPA's are the reference."""
    of = inputs(len(positions), dtype)
    of[2] = torch.randn(len(positions), 2, 24, dtype=dtype, requires_grad=True)
    upstream = torch.randn(len(positions), 6, 24, dtype=dtype)
    documents = pack_documents(positions, CPU)

    def with_gradients(out, of):
        return [out, *torch.autograd.grad(out, of, upstream.to(out.dtype))]

    def by_sdpa(of, expand):
        monkeypatch.setattr(attention, "expands_heads", lambda *_: expand)
        return with_gradients(attention._by_sdpa(*of, documents, scale, window, dropout=0.0), of)

    reference, repeated = (by_sdpa(of, expand) for expand in (False, True))
    exact = by_sdpa(in_float64(of), False)
    blocks = with_gradients(packed_attention(*of, documents, scale, window), of)
    for place, name in enumerate(("out", "q", "k", "v")):
        for ours in (blocks, repeated):
            assert_close_as(reference[place], ours[place], exact[place], name)


def test_a_prefix_of_many_branches_has_the_gradient_of_all_in_16_bits():
    """Each branch adds a part to the gradients of the prefix's keys and values, all of one sign here."""
    num_branches = 600
    positions = np.array([0, 1, 2, 3] + [4] * num_branches)
    of = [t.detach().bfloat16().requires_grad_() for t in inputs(len(positions))]
    documents = pack_documents(positions, CPU)

    def gradient_of_values(of):
        out = attention._by_sdpa(*of, documents, None, None, 0.0)
        return torch.autograd.grad(out, of[2], torch.ones_like(out))[0][:4].double()

    exact, ours = gradient_of_values(in_float64(of)), gradient_of_values(of)
    # holds: meaning, a sum in bf16 stays at about 256 of 600 parts, 50% off; each part's rounding makes 1e-3
    assert ((ours - exact).abs() / exact.abs()).max() < 0.02


@pytest.mark.parametrize("positions", [PACKED, TREES], ids=["packed", "trees"])
def test_each_process_of_a_context_parallel_group_computes_its_pieces(positions):
    positions = positions[: len(positions) // 4 * 4]
    pieces = row_pieces(len(positions), 2)
    of = inputs(len(positions))
    upstream = torch.randn(len(positions), 6, 16)

    def whole(q, k, v):
        out = packed_attention(q, k, v, pack_documents(positions, CPU), None)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream.to(out.dtype))]

    reference = whole(*of)
    with float64():
        exact = whole(*in_float64(of))
    q, k, v = of
    order = np.concatenate(pieces)  # as keys and values are gathered
    ours = [torch.zeros_like(t) for t in reference]
    for rank, mine in enumerate(pieces):
        out = packed_attention(
            q[mine], k[order], v[order], pack_documents(positions, CPU, pieces, rank), None
        )
        ours[0][mine] = out.detach()
        for total, part in zip(ours[1:], torch.autograd.grad(out, of, upstream[mine]), strict=True):
            total += part
    for place, name in enumerate(("out", "q", "k", "v")):
        assert_close_as(reference[place], ours[place], exact[place], name)


def test_a_sequence_is_computed_bit_for_bit_the_same_whatever_its_padding():
    """Padding is neither an output nor a gradient."""
    q, k, v = of = inputs(40)
    alone = packed_attention(q[:20], k[:20], v[:20], pack_documents(np.arange(20), CPU), None)
    both = packed_attention(*of, pack_documents(np.concatenate([np.arange(20), np.arange(20)]), CPU), None)
    assert torch.equal(alone, both[:20])
    ragged = np.concatenate([np.arange(5), np.arange(31), np.arange(4)])
    (grads,) = torch.autograd.grad(packed_attention(*of, pack_documents(ragged, CPU), None)[:5].sum(), k)
    assert grads[:5].abs().sum() > 0 and not grads[5:].any()


def test_the_tokens_of_a_shared_prefix_are_queries_once():
    documents = pack_documents(TREES, CPU)
    asked = sum(bucket.queries.numel() for bucket in documents.buckets)
    assert asked < len(TREES) + 8 * len(documents.buckets) + 32 < sum(map(len, paths(TREES)))


def test_a_block_holds_64_queries_at_most_and_no_keys_that_none_of_them_sees():
    (bucket,) = pack_documents(np.arange(130), CPU).buckets
    assert [tuple(block) for block in bucket.blocks] == [(0, 44, 1, 44), (44, 88, 45, 88), (88, 130, 89, 130)]
