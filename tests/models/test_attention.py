"""Packed attention: every way to compute it gives the same, and equals attention over each sequence alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rl.models import attention
from rl.models.attention import pack_documents, packed_attention, row_pieces

CPU = torch.device("cpu")


def inputs(num_tokens, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(num_tokens, heads, 16, dtype=dtype, requires_grad=True) for heads in (6, 2, 2)]


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
        alone = (t[path].transpose(0, 1)[None] for t in (q, k, v))
        expected = F.scaled_dot_product_attention(*alone, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        assert torch.allclose(got[path], expected, atol=1e-5)
        seen |= set(path)
    assert seen == set(range(len(positions)))


@pytest.mark.parametrize("positions", [PACKED, TREES], ids=["packed", "trees"])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("scale, window", [(None, None), (0.3, None), (None, 9), (0.3, 70)])
def test_blocks_and_sdpa_and_repeated_heads_give_the_same(
    monkeypatch, positions, dtype, limit, scale, window
):
    """Outputs and gradients; values may be of another size than keys."""
    of = inputs(len(positions), dtype)
    of[2] = torch.randn(len(positions), 2, 24, dtype=dtype, requires_grad=True)
    documents = pack_documents(positions, CPU)
    ways = [packed_attention(*of, documents, scale, window)]
    for expand in (False, True):
        monkeypatch.setattr(attention, "expands_heads", lambda *_, chosen=expand: chosen)
        ways.append(attention._by_sdpa(*of, documents, scale, window, dropout=0.0))
    upstream = torch.randn(ways[0].shape, dtype=dtype)
    found = [[out, *torch.autograd.grad(out, of, upstream)] for out in ways]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a - b).abs().max() < limit * max(1.0, a.abs().max().item())


@pytest.mark.parametrize("positions", [PACKED, TREES], ids=["packed", "trees"])
def test_each_process_of_a_context_parallel_group_computes_its_pieces(positions):
    positions = positions[: len(positions) // 4 * 4]
    pieces = row_pieces(len(positions), 2)
    q, k, v = of = inputs(len(positions))
    expected = packed_attention(*of, pack_documents(positions, CPU), None)
    upstream = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, of, upstream)
    order = np.concatenate(pieces)  # as keys and values are gathered
    found = [torch.zeros_like(t) for t in of]
    for rank, mine in enumerate(pieces):
        out = packed_attention(
            q[mine], k[order], v[order], pack_documents(positions, CPU, pieces, rank), None
        )
        assert torch.allclose(out, expected[mine], atol=1e-5)
        for whole, part in zip(found, torch.autograd.grad(out, of, upstream[mine]), strict=True):
            whole += part
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected_grads, strict=True))


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
