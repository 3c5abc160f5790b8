"""Attention of rows in bf16 on a GPU: FlexAttention's mask of a tree, by torch's own eager FlexAttention."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from rl.models import gpu_attention
from rl.models.attention import pack_documents, packed_attention
from rl.models.gpu_attention import VarlenOrFlex, ancestor_mask, gpu_documents
from tests.models.test_attention import CPU, PACKED, TREES, in_float64, inputs, paths
from tests.numeric import assert_close_as, float64

from torchtitan.models.common.attention import VarlenMetadata


@pytest.mark.parametrize("positions", [PACKED, TREES], ids=["packed", "trees"])
def test_a_token_sees_its_ancestors_and_itself(positions):
    size = len(positions)
    expected = np.zeros((size, size), bool)
    for path in paths(positions):
        for place, token in enumerate(path):
            expected[token, path[: place + 1]] = True
    mask = create_mask(ancestor_mask(positions, CPU), 1, 1, size, size, device="cpu")
    assert (mask[0, 0].numpy() == expected).all()


def test_rows_with_branches_go_to_flex_attention_and_others_to_varlen(monkeypatch):
    monkeypatch.setattr(gpu_attention, "create_attention_mask", create_block_mask)
    assert isinstance(gpu_documents(TREES, CPU), BlockMask)
    documents = gpu_documents(PACKED, CPU)
    assert isinstance(documents, VarlenMetadata) and documents.max_q == 300


def test_kinds_of_rows_and_of_gradients_are_compiled_each_and_none_falls_back(monkeypatch):
    """By torch's own count of them. Past its limit FlexAttention goes on without a kernel, and says so at most."""
    # A CPU has no backward of it: what is asked for here is a kernel for each kind alone.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    compiled = torch.compile(flex_attention, dynamic=True, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for size, shape in product((96, 250, 300), product((False, True), repeat=3)):
            positions = np.concatenate([np.arange(size - 20), np.arange(size - 40, size - 20)])
            mask = create_block_mask(ancestor_mask(positions, CPU), 1, None, size, size, device="cpu")
            q, k, v = (torch.zeros(1, 2, size, 16, requires_grad=needed) for needed in shape)
            assert compiled(q, k, v, block_mask=mask).shape == q.shape


def test_flex_attention_gives_what_sdpa_gives(monkeypatch):
    backends = []

    def flex(*tensors, kernel_options, **settings):
        backends.append(kernel_options["BACKEND"])
        return flex_attention(*tensors, kernel_options=kernel_options, **settings)

    monkeypatch.setattr(gpu_attention, "create_attention_mask", create_block_mask)
    monkeypatch.setattr(gpu_attention, "activate_flash_attention", lambda: "FA2")
    monkeypatch.setattr(gpu_attention, "_compiled_flex_attention", flex)
    q, k, v = (t.detach() for t in inputs(len(TREES)))
    masks = gpu_documents(TREES, CPU)
    module = VarlenOrFlex.Config().build()
    got = module(q[None], k[None], v[None], attention_masks=masks, scale=0.3, enable_gqa=True)[0]
    reference = packed_attention(q, k, v, pack_documents(TREES, CPU), 0.3)
    with float64():
        exact = packed_attention(*in_float64((q, k, v)), pack_documents(TREES, CPU), 0.3)
    assert_close_as(reference, got, exact)
    assert backends == ["TRITON"]  # "AUTO" takes torch's kernel for decoding for short rows, which then fails
