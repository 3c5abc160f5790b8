import asyncio
import itertools
import multiprocessing
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rl.errors import RunError
from rl.weight_sync import shared_memory
from rl.weight_sync.buffers import keys
from rl.weight_sync.files import release_files
from rl.weight_sync.manifest import LocalShard, Manifest, Shard, assemble
from rl.weight_sync.shared_memory import SharedMemory
from tests.weight_sync import pushed
from tests.weight_sync.pushed import Pushed


def publish(transport, version, ranks):
    return Manifest(
        version,
        tuple(
            s
            for rank, shards in enumerate(ranks)
            for s in asyncio.run(transport.publish("model", version, rank, shards))
        ),
    )


def fetch(transport, manifest):
    return dict(assemble(transport.fetch(manifest)))


def rows(name, full, parts):
    bounds = [round(i * len(full) / parts) for i in range(parts + 1)]
    return [
        [LocalShard(name, tuple(full.shape), (a,) + (0,) * (full.ndim - 1), full[a:b], full.dtype)]
        for a, b in itertools.pairwise(bounds)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uneven_row_shards_come_back_whole_and_bitwise(tmp_path, dtype):
    full = torch.randn(7, 5).to(dtype)
    transport = SharedMemory(str(tmp_path))
    assert torch.equal(fetch(transport, publish(transport, 1, rows("w", full, 3)))["w"], full)


def test_blocks_of_a_two_dimensional_layout_come_back_whole(tmp_path):
    full = torch.randn(6, 4)
    corners = [(row, column) for row in (0, 3) for column in (0, 2)]
    blocks = [[LocalShard("w", (6, 4), (r, c), full[r : r + 3, c : c + 2], full.dtype)] for r, c in corners]
    transport = SharedMemory(str(tmp_path))
    assert torch.equal(fetch(transport, publish(transport, 1, blocks))["w"], full)


def test_shards_come_back_whole_in_whatever_order_they_are_listed():
    """Blocks that touch do not overlap, whichever comes first; blocks that share an element do."""
    full = torch.arange(24.0).reshape(6, 4)
    corners = [(row, column) for row in (0, 3) for column in (0, 2)]
    blocks = [
        (Shard("w", full.dtype, (6, 4), c, (3, 2), ""), full[c[0] : c[0] + 3, c[1] : c[1] + 2])
        for c in corners
    ]
    for listed in itertools.permutations(blocks):
        assert torch.equal(dict(assemble({"w": listed}))["w"], full)
    row = Shard("w", full.dtype, (6, 4), (2, 0), (3, 2), "")
    for listed in itertools.permutations([*blocks[:2], (row, full[2:5, :2]), blocks[3]]):
        with pytest.raises(ValueError, match="or overlap"):
            dict(assemble({"w": listed}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_is_put_together_has_the_dtype_of_its_parts(tmp_path, dtype):
    full = torch.arange(12).view(6, 2).to(dtype)
    transport = SharedMemory(str(tmp_path))
    whole = fetch(transport, publish(transport, 1, rows("w", full, 3)))["w"]
    assert whole.dtype == dtype and torch.equal(whole, full)


def test_a_version_whose_file_is_gone_already_is_released_all_the_same(tmp_path):
    """As after a death, or where somebody cleaned up."""
    transport = SharedMemory(str(tmp_path))
    manifest = publish(transport, 1, rows("w", torch.ones(4, 2), 2))
    min(tmp_path.iterdir()).unlink()
    for _ in range(2):
        asyncio.run(transport.release(manifest))
    assert not list(tmp_path.glob("*.bin"))


def test_versions_do_not_mix_and_a_released_one_is_refused(tmp_path):
    transport = SharedMemory(str(tmp_path))
    manifests = [publish(transport, v, rows("w", torch.full((4, 2), float(v)), 2)) for v in (1, 2)]
    assert fetch(transport, manifests[0])["w"].unique().tolist() == [1.0]
    assert fetch(transport, manifests[1])["w"].unique().tolist() == [2.0]
    asyncio.run(transport.release(manifests[0]))
    with pytest.raises(RunError, match="policy version 1 was released"):
        fetch(transport, manifests[0])
    assert fetch(transport, manifests[1])["w"].unique().tolist() == [2.0]


def test_what_was_fetched_stays_valid_after_release(tmp_path):
    transport = SharedMemory(str(tmp_path))
    manifest = publish(transport, 1, rows("w", torch.ones(4, 2), 1))
    fetched = transport.fetch(manifest)
    asyncio.run(transport.release(manifest))
    publish(transport, 2, rows("w", torch.zeros(4, 2), 1))  # not where it is still read
    assert dict(assemble(fetched))["w"].sum() == 8


def test_a_hundred_versions_take_turns_in_the_same_files(tmp_path):
    """Two are there at a time: one that is served, and one that is written."""
    transport, manifests, inodes = SharedMemory(str(tmp_path)), [], set()
    for version in range(100):
        manifests.append(publish(transport, version, rows("w", torch.full((64, 33), float(version)), 2)))
        for manifest in manifests[-2:]:
            assert fetch(transport, manifest)["w"].unique().tolist() == [float(manifest.version)]
        if version:
            asyncio.run(transport.release(manifests[-2]))
        inodes |= {path.stat().st_ino for path in tmp_path.iterdir()}
        assert len(list(tmp_path.iterdir())) <= 4
    assert len(inodes) == 4  # of two ranks
    with pytest.raises(RunError, match="policy version 98 was released"):
        fetch(transport, manifests[98])


def test_a_file_of_another_size_is_not_taken(tmp_path):
    transport = SharedMemory(str(tmp_path))
    asyncio.run(transport.release(publish(transport, 1, rows("w", torch.ones(4, 2), 1))))
    manifest = publish(transport, 2, rows("w", torch.ones(400, 2), 1))
    assert fetch(transport, manifest)["w"].sum() == 800 and len(list(tmp_path.iterdir())) == 1


def test_a_new_process_goes_on_in_the_files_of_one_that_died(tmp_path):
    """A trainer that was started again has mapped nothing."""
    transport = SharedMemory(str(tmp_path))
    asyncio.run(transport.release(publish(transport, 7, rows("w", torch.ones(4, 2), 1))))
    (file,) = tmp_path.iterdir()
    inode = file.stat().st_ino
    shared_memory._own.clear()
    manifest = publish(transport, 6, rows("w", torch.full((4, 2), 6.0), 1))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_ino == inode and fetch(transport, manifest)["w"].unique().tolist() == [6.0]


def test_a_version_that_was_begun_by_one_that_died_takes_no_room(tmp_path):
    """The run goes on from an older step; perhaps with fewer ranks."""
    transport, full = SharedMemory(str(tmp_path)), torch.randn(64, 5)
    for version in (4, 5, 6):
        manifest = publish(transport, version, rows("w", full, 2))
        if version < 6:
            asyncio.run(transport.release(manifest))
    publish(transport, 7, rows("w", full, 2)[:1])  # the second rank dies; nobody has the manifest
    asyncio.run(transport.release(manifest))  # all are forgotten
    for version in (5, 6, 7, 8):
        manifest = publish(transport, version, rows("w", full + version, 1))
        assert torch.equal(fetch(transport, manifest)["w"], full + version)
        published = [file.name for file in tmp_path.iterdir() if file.name.endswith(".bin")]
        assert published == [f"model-v{version}-rank0.bin"]
        asyncio.run(transport.release(manifest))


def test_released_files_of_ranks_that_are_no_more_go(tmp_path):
    """A trainer that lost a host has fewer; other models' files, and those that are read, stay."""
    transport, full = SharedMemory(str(tmp_path)), torch.randn(64, 5)
    before = publish(transport, 1, rows("w", full, 4))
    read = fetch(transport, before)
    (tmp_path / "other-v1-rank3.bin.released").touch()
    asyncio.run(transport.release(before))
    after = publish(transport, 2, rows("w", full, 2))
    asyncio.run(transport.release(after))
    names = {
        file.name.partition("-v")[0] + file.name[file.name.index("-rank") :] for file in tmp_path.iterdir()
    }
    assert names == {"model-rank0.bin.released", "model-rank1.bin.released", "other-rank3.bin.released"}
    assert torch.equal(read["w"], full)


def test_another_ranks_files_may_change_their_names_while_a_version_is_published(tmp_path):
    transport, another = SharedMemory(str(tmp_path)), tmp_path / "model-v0-rank1.bin"
    another.touch()
    ended = threading.Event()

    def take_and_release():
        while not ended.is_set():
            another.rename(f"{another}.released")
            Path(f"{another}.released").rename(another)

    with ThreadPoolExecutor() as pool:
        renaming = pool.submit(take_and_release)
        try:
            for version in range(300):
                manifest = publish(transport, version, rows("w", torch.full((4, 2), float(version)), 1))
                assert fetch(transport, manifest)["w"].unique().tolist() == [float(version)]
                release_files(keys(manifest))  # of this rank: a version without the other would end its file
        finally:
            ended.set()
        renaming.result()


@pytest.mark.parametrize("seed", range(20))
def test_no_reader_ever_sees_another_version_than_its_own(tmp_path, seed):
    """Readers hold what they fetched for as long as they like, released or not."""
    rng, transport = random.Random(seed), SharedMemory(str(tmp_path))
    versions, held = [], []
    for version in range(60):
        versions.append(publish(transport, version, rows("w", torch.full((8, 3), float(version)), 2)))
        if rng.random() < 0.6:
            read = rng.choice(versions[-2:])
            held.append((read.version, transport.fetch(read)))
        while len(versions) > 2:
            asyncio.run(transport.release(versions.pop(0)))
        rng.shuffle(held)
        del held[rng.randrange(4) :]
        for number, fetched in held:
            assert dict(assemble(fetched))["w"].unique().tolist() == [float(number)]


def test_shards_are_cast_as_they_are_written(tmp_path):
    full = torch.randn(8, 3)
    transport = SharedMemory(str(tmp_path))
    manifest = publish(transport, 1, [[LocalShard("w", (8, 3), (0, 0), full, torch.bfloat16)]])
    assert torch.equal(fetch(transport, manifest)["w"], full.bfloat16()) and manifest.num_bytes == 8 * 3 * 2


def test_a_missing_or_doubled_shard_is_an_error_not_garbage():
    first = Shard("w", torch.float32, (4, 2), (0, 0), (2, 2), "")
    with pytest.raises(ValueError, match="hold 4 of its 8 elements"):
        dict(assemble({"w": [(first, torch.ones(2, 2))]}))
    with pytest.raises(ValueError, match="or overlap"):
        dict(assemble({"w": [(first, torch.ones(2, 2)), (first, torch.ones(2, 2))]}))


def test_too_little_shared_memory_is_an_error_not_a_crash(tmp_path, monkeypatch):
    import errno
    import os

    def full(file, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match="No space left on device.*; enlarge it"):
        publish(SharedMemory(str(tmp_path)), 1, rows("w", torch.ones(4, 2), 1))
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_taken_while_it_was_opened_is_not_read(tmp_path, monkeypatch):
    transport = SharedMemory(str(tmp_path))
    first = publish(transport, 1, rows("w", torch.ones(4, 2), 1))
    lock = shared_memory.fcntl.flock

    def too_late(file, how):
        monkeypatch.setattr(shared_memory.fcntl, "flock", lock)
        asyncio.run(transport.release(first))
        publish(transport, 2, rows("w", torch.full((4, 2), 2.0), 1))
        lock(file, how)

    monkeypatch.setattr(shared_memory.fcntl, "flock", too_late)
    with pytest.raises(RunError, match="policy version 1 was released"):
        transport.fetch(first)


def test_a_transport_that_pushes_has_what_the_first_promises(tmp_path):
    """See pushed.py. A receiver that has fetched before is sent the next version; a released one is refused."""
    directory = tmp_path / "of-its-sockets"
    directory.mkdir()
    transport = Pushed(str(directory))
    full = torch.randn(7, 5)
    manifests = [publish(transport, 1, rows("w", full, 3))]
    with receiver(directory) as ask:
        assert torch.equal(ask(manifests[0]), full)
        assert ask.counts() == {"pushed": 0, "pulled": 3}
        manifests.append(publish(transport, 2, rows("w", full + 1, 2)))
        assert torch.equal(ask(manifests[1]), full + 1)
        assert ask.counts() == {"pushed": 2, "pulled": 3}
    manifests.append(publish(transport, 3, rows("w", full + 2, 1)))  # its receiver is gone
    asyncio.run(transport.release(manifests[1]))
    with receiver(directory) as ask:
        with pytest.raises(RunError, match="released before it was read"):
            ask(manifests[1])
        assert torch.equal(ask(manifests[2]), full + 2)
        assert ask.counts() == {"pushed": 0, "pulled": 1}


@contextmanager
def receiver(directory):
    """ask(manifest): the tensor "w", as another process fetches it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive_versions, args=(str(directory), there), daemon=True)
    process.start()
    counts = {}

    def ask(manifest):
        here.send(manifest)
        answer, own = here.recv()
        counts.update(own)
        if isinstance(answer, Exception):
            raise answer
        return torch.from_numpy(answer)

    ask.counts = lambda: counts
    try:
        yield ask
    finally:
        process.kill()
        process.join()


def _receive_versions(directory, pipe):
    transport = Pushed(directory)
    while True:
        try:
            answer = fetch(transport, pipe.recv())["w"].numpy()
        except RunError as error:
            answer = error
        pipe.send((answer, pushed._process(directory).counts))


def test_a_tensor_of_one_shard_comes_once_and_is_no_copy():
    full = torch.arange(6.0).view(2, 3)
    shard = Shard("w", full.dtype, (2, 3), (0, 0), (2, 3), "")
    assert [(name, tensor is full) for name, tensor in assemble({"w": [(shard, full)]})] == [("w", True)]


def test_the_memory_of_a_file_that_gave_way_to_a_larger_one_is_given_back(tmp_path):
    """It is there for as long as anybody has it mapped."""
    transport = SharedMemory(str(tmp_path))
    asyncio.run(transport.release(publish(transport, 1, rows("w", torch.ones(4, 2), 1))))
    publish(transport, 2, rows("w", torch.ones(400, 2), 1))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert not [line for line in mapped if line.endswith("(deleted)")]


def test_a_rank_may_have_tensors_of_any_size_and_dtype_or_none_at_all(tmp_path):
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(5), "c": torch.randn(3, 7).bfloat16()
    }  # fmt: skip
    shards = [LocalShard(name, tuple(t.shape), (0,) * t.ndim, t, t.dtype) for name, t in tensors.items()]
    transport = SharedMemory(str(tmp_path))
    got = fetch(transport, publish(transport, 1, [shards, []]))
    assert got.keys() == tensors.keys()
    assert all(got[name].dtype == t.dtype and torch.equal(got[name], t) for name, t in tensors.items())
    assert [file.name for file in tmp_path.iterdir()] == ["model-v1-rank0.bin"]


def test_a_file_that_cannot_be_mapped_says_so_and_is_closed(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    shard = Shard("w", torch.float32, (4,), (0,), (4,), str(empty))
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="empty file"):
        list(SharedMemory(tmp_path).fetch(Manifest(0, (shard,))))
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_torchstore_is_given_each_rank_of_each_version_and_told_to_forget_a_released_one(monkeypatch):
    from rl.weight_sync import torchstore as module

    store = {}

    async def put(key, tensor):
        assert key not in store  # putting again what is read tears it
        store[key] = tensor.clone()

    async def get(key):
        return store[key]

    async def exists(key):
        return key in store

    async def delete(key):
        del store[key]

    for function in (put, get, exists, delete):
        monkeypatch.setattr(module.torchstore, function.__name__, function)
    transport = module.TorchStore()
    weights = [torch.arange(14.0).reshape(7, 2) + version for version in (1, 2)]
    first, second = (publish(transport, v, rows("w", full, 3)) for v, full in enumerate(weights, 1))
    assert torch.equal(fetch(transport, first)["w"], weights[0])
    asyncio.run(transport.release(first))
    with pytest.raises(RunError, match="policy version 1 was released"):
        fetch(transport, first)
    assert len(store) == 3 and torch.equal(fetch(transport, second)["w"], weights[1])
