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


def results(positions, of):
    """Outputs and gradients."""
    out = packed_attention(*of, pack_documents(positions, CPU), None)
    return [out, *torch.autograd.grad(out.float().square().sum(), of)]


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
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_matmuls_and_flash_and_repeated_heads_give_the_same(monkeypatch, positions, dtype, limit):
    of, found = inputs(len(positions), dtype), []
    for matmuls, expand in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(attention, "matmul_is_faster", lambda *_, chosen=matmuls: chosen)
        monkeypatch.setattr(attention, "expands_heads", lambda *_, chosen=expand: chosen)
        found.append(results(positions, of))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a - b).abs().max() < limit * max(1.0, a.abs().max().item())


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["whole", "first of two", "second of two"])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_siblings_of_a_long_path_are_computed_together(monkeypatch, rank, dtype, limit, scale):
    """Outputs and gradients are those of each branch alone, for the tokens of each process too."""
    monkeypatch.setattr(attention, "_FAN_PATHS", (1, 1))
    positions = TREES[: len(TREES) // 4 * 4]
    pieces = row_pieces(len(positions), 1 if rank is None else 2)
    mine = pieces[rank or 0]
    q, k, v = inputs(len(positions), dtype)
    order = np.concatenate(pieces)  # as keys and values are gathered
    found = []
    for fans in (False, True):
        documents = pack_documents(positions, CPU, pieces, rank or 0, fans=fans)
        assert bool(documents.fans) == fans
        out = packed_attention(q[mine], k[order], v[order], documents, scale)
        torch.manual_seed(1)
        found.append([out, *torch.autograd.grad(out, (q, k, v), torch.randn_like(out))])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() < limit * max(1.0, a.abs().max().item())


@pytest.mark.parametrize(
    "path, own, together",
    [(511, 80, False), (512, 80, True), (512, 64, False), (2047, 8, False), (2048, 8, True)],
)
def test_a_fan_has_a_long_path_and_siblings_too_long_for_matmuls(path, own, together):
    siblings = np.concatenate([np.arange(path + own), *[np.arange(path, path + own)] * 3])
    documents = pack_documents(siblings, CPU, fans=True)
    assert bool(documents.fans) == together != bool(documents.branches)


def test_short_rows_take_matmuls_and_a_document_alone_does_not():
    def of(n, keys, dtype):
        return torch.zeros(n, 1, 4, 16, dtype=dtype), torch.zeros(n, 1, keys, 16, dtype=dtype)

    faster = attention.matmul_is_faster
    assert faster(*of(8, 64, torch.bfloat16), True) and faster(*of(8, 64, torch.bfloat16), False)
    assert faster(*of(8, 64, torch.float32), False) and not faster(*of(8, 64, torch.float32), True)
    assert not faster(*of(8, 2048, torch.bfloat16), True)
    assert not faster(*of(1, 64, torch.bfloat16), True)
    assert not faster(*(t.to("meta") for t in of(8, 64, torch.bfloat16)), True)  # another device


def test_the_tokens_of_a_shared_prefix_are_queries_once():
    documents = pack_documents(TREES, CPU)
    asked = sum(q.numel() for q in documents.queries) + sum(b.queries.numel() for b in documents.branches)
    assert asked < len(TREES) + 8 * len(documents.branches) + 32 < sum(map(len, paths(TREES)))
