"""What a suspended engine's tensors held, in page-locked memory."""

import random

import numpy as np
import pytest
import torch

from rl.errors import RunError
from rl.models import suspension
from rl.models.suspension import parts_of

MIB = 2**20


def test_memory_is_locked_in_powers_of_two_and_a_rest():
    rng = random.Random(0)
    for num_bytes in [1, MIB - 1, MIB, MIB + 1, 9 * 2**30, *(rng.randrange(1, 2**36) for _ in range(1000))]:
        *most, last = parts_of(num_bytes)
        assert sum(most) + last == num_bytes
        assert all(part.bit_count() == 1 and part >= MIB for part in most)
        assert last < MIB or last.bit_count() == 1
        assert len(most) < 36


@pytest.fixture
def locked(monkeypatch):
    """Sizes of what is locked. There is no GPU here."""
    sizes, empty = [], torch.empty

    def pinned(*size, pin_memory=False, **how):
        if pin_memory:
            sizes.append(size[0])
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return sizes


def test_what_is_put_is_taken_again_and_memory_is_locked_once(locked):
    host = suspension._Host()
    tensors = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (5, MIB, 3 * MIB + 7)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    for time in range(2):
        expected = [tensor + time for tensor in tensors]
        for tensor, value in zip(tensors, expected, strict=True):
            tensor.copy_(value)
        for storage in storages:
            host.put(storage)
        host.rewind()
        for tensor in tensors:
            tensor.zero_()
        for storage in storages:
            host.take(storage)
        host.rewind()
        assert all(map(torch.equal, tensors, expected))
    assert locked == [5, MIB, 2 * MIB, MIB, 7]


def test_what_cannot_be_resumed_for_want_of_room_can_be_once_there_is(tmp_path, monkeypatch):
    tensors = [torch.full((5,), float(i)) for i in range(4)]
    suspended = suspension.Suspension(torch.device("cpu"))
    suspended.suspend(tensors, tmp_path)
    resize, left = torch.UntypedStorage.resize_, [2]

    def resized(storage, size):
        if size:
            if not left[0]:
                raise RuntimeError("CUDA out of memory")
            left[0] -= 1
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)
    with pytest.raises(RunError, match="cpu has no room for what was suspended .*generator.kv_cache_gib"):
        suspended.resume()
    assert suspended.is_suspended and not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    left[0] = 4
    suspended.resume()
    assert [tensor.tolist() for tensor in tensors] == [[float(i)] * 5 for i in range(4)]


def test_what_leaves_a_gpu_comes_back_as_it_was_then_and_the_gpu_has_its_memory(
    tmp_path, monkeypatch, locked
):
    """Also after a time when the host had no room for it."""
    tensors = [torch.full((5,), float(i)) for i in range(3)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    pinned, refused, sizes_at_return = torch.empty, [], []

    def with_room_for_two(*size, pin_memory=False, **how):
        if pin_memory and len(locked) == 2 and not refused:
            refused.append(size)
            raise RuntimeError("CUDA error: out of memory")
        return pinned(*size, pin_memory=pin_memory, **how)

    def note_sizes():
        sizes_at_return.append([storage.nbytes() for storage in storages])

    monkeypatch.setattr(torch, "empty", with_room_for_two)
    monkeypatch.setattr(torch.cuda, "empty_cache", note_sizes)
    monkeypatch.setattr(suspension, "_storages", lambda *_: storages)  # these stand for a GPU's
    suspended = suspension.Suspension(torch.device("cuda"))
    with pytest.raises(RunError, match="no room in the host's memory for what is suspended .*out of memory"):
        suspended.suspend(tensors, tmp_path)
    assert not suspended.is_suspended and not sizes_at_return
    assert [tensor.tolist() for tensor in tensors] == [[float(i)] * 5 for i in range(3)]
    locked.clear()
    for turn in range(1, 3):
        for i, tensor in enumerate(tensors):
            tensor.fill_(10.0 * turn + i)
        suspended.suspend(tensors, tmp_path)
        suspended.resume()
        assert [tensor.tolist() for tensor in tensors] == [[10.0 * turn + i] * 5 for i in range(3)]
    assert sizes_at_return == [[0, 0, 0]] * 2
    assert locked == [20, 20, 20]  # once for both turns


def test_what_is_mapped_stays_and_what_two_tensors_share_comes_back_to_both(tmp_path):
    mapped, whole = torch.from_numpy(np.arange(3.0)), torch.arange(6.0)
    part = whole[2:4]
    suspended = suspension.Suspension(torch.device("cpu"))
    suspended.suspend([part, mapped, whole, torch.empty(0)], tmp_path)
    assert mapped.tolist() == [0.0, 1.0, 2.0] and whole.untyped_storage().nbytes() == 0
    suspended.resume()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and part.tolist() == [2.0, 3.0]
