"""LoRA products by adapter, and who has a place in vLLM."""

import pytest
import torch

from rl.errors import RunError
from rl.models.generator.adapter_slots import AdapterSlots
from rl.models.generator.cpu_lora import bgmv_expand, bgmv_expand_slice, bgmv_shrink
from tests.numeric import assert_close_as


@pytest.mark.parametrize(
    "indices",
    [
        [0, 0, 0, 0],
        [2, -1, 0, 2],
        [-1, -1, -1, -1],
        [1, 2, 0, -1],
        [0, 1, 0, 1],
        [0, 1, *[2] * 9, 1, -1],  # one with many more rows than others
    ],
)
def test_each_token_meets_its_own_adapters_matrices(indices):
    torch.manual_seed(0)
    size = len(indices)
    x, a, b = torch.randn(size, 6), torch.randn(3, 1, 2, 6), torch.randn(3, 1, 5, 2)
    index, y = torch.tensor(indices), torch.randn(size, 9)
    shrunk = torch.full((size, 2), 7.0)
    bgmv_shrink(x, a, shrunk, index, 0.5)
    added, put = y.clone(), y.clone()
    bgmv_expand(shrunk, b, added, index)
    bgmv_expand_slice(shrunk, b, put, index, 3, 5, add_inputs=False)

    def by_hand(x, a, b, y):
        """What each of the three makes of each token."""
        rows = []
        for t, i in enumerate(indices):
            inner = 0.5 * a[i, 0] @ x[t] if i >= 0 else torch.zeros(2, dtype=x.dtype)
            outer = b[i, 0] @ inner if i >= 0 else torch.zeros(5, dtype=x.dtype)
            sum_ = y[t] + torch.cat([outer, torch.zeros(4, dtype=x.dtype)])
            rows.append([inner, sum_, torch.cat([y[t, :3], outer, y[t, 8:]])])
        return [torch.stack(of) for of in zip(*rows, strict=True)]

    reference, exact = by_hand(x, a, b, y), by_hand(*(t.double() for t in (x, a, b, y)))
    for place, ours in enumerate((shrunk, added, put)):
        assert_close_as(reference[place], ours, exact[place], place)


@pytest.mark.parametrize("indices", [[0] * 64, [0, 1] * 32, [1, -1] * 32])
def test_a_product_is_rounded_as_the_trainers(indices):
    """rl/models/lora.py adds a product in bf16 to a sum in bf16."""
    torch.manual_seed(0)
    index, y = torch.tensor(indices), torch.randn(64, 48, dtype=torch.bfloat16)
    inner, b = torch.randn(64, 16), torch.randn(2, 1, 48, 16, dtype=torch.bfloat16)
    expected = y.clone()
    for t, i in enumerate(indices):
        if i >= 0:
            expected[t] += torch.nn.functional.linear(inner.bfloat16(), b[i, 0])[t]
    bgmv_expand(inner, b, y, index)
    assert torch.equal(y, expected)


class VLLM:
    def __init__(self, size):
        self.held = {}
        self.slots = AdapterSlots(self.add, lambda number: self.held.pop(number), size)

    def add(self, request):
        if "broken" in request.lora_path:
            raise ValueError("no such file")
        assert request.lora_int_id not in self.held or request.load_inplace
        self.held[request.lora_int_id] = request.lora_path


def test_the_directory_used_longest_ago_makes_room():
    vllm = VLLM(2)
    for directory in ("/a", "/b"):
        assert vllm.slots.read(directory, ())
    assert vllm.slots["/a"].lora_path == "/a"  # used again
    assert vllm.slots.read("/c", ())
    assert sorted(vllm.held.values()) == ["/a", "/c"]
    assert not vllm.slots.read("/d", {"/a", "/c"})
    assert vllm.slots.read("/d", {"/a"})
    assert sorted(vllm.held.values()) == ["/a", "/d"] and len(vllm.held) == 2
    vllm.slots.clear()
    assert not vllm.held


def test_what_was_published_stays():
    vllm = VLLM(2)
    vllm.slots.publish("policy", lambda number: f"/files/{number}")
    assert vllm.slots.read("/a", ()) and vllm.slots.read("/b", ())
    assert sorted(vllm.held.values()) == ["/b", "/files/1"]
    vllm.slots.publish("policy", lambda number: f"/files/{number}")
    assert vllm.slots["policy"].lora_int_id == 1
    vllm.slots.publish("other", lambda number: f"/files/{number}")
    with pytest.raises(RunError, match="one more than the 2 that this generator holds"):
        vllm.slots.publish("third", lambda number: "/files")
    assert not vllm.slots.read("/a", ())


def test_an_adapter_that_cannot_be_read_takes_no_place():
    vllm = VLLM(1)
    with pytest.raises(RunError, match="could not load the adapter /broken: no such file"):
        vllm.slots.read("/broken", ())
    assert vllm.slots.read("/a", ())
    with pytest.raises(RunError, match="takes no adapters"):
        VLLM(0).slots.read("/a", ())
