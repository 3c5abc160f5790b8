"""What changed between two versions goes from host to host, and nothing else can come of it than the new version."""

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import WeightsUnreachable
from rl.host_protocol import ask, greeting, request_of
from rl.paths import lock
from rl.weight_sync import delta, remote_files
from rl.weight_sync.files import AT, pattern_of, version_of, without_version
from rl.weight_sync.manifest import LocalShard, Manifest, assemble
from rl.weight_sync.remote_files import fetch_file, send_file
from rl.weight_sync.shared_memory import SharedMemory

NUM_BYTES = 3 * delta.PART_BYTES + 64 * 1234  # of a file: a multiple of 64


def bytes_of(words, size):
    return np.resize(np.frombuffer(words or b"\0", np.uint8), size)


@settings(max_examples=200)
@given(st.data())
def test_what_changed_makes_the_new_version_and_nothing_else(data):
    size = data.draw(st.integers(1, 3000))
    base = bytes_of(data.draw(st.binary(max_size=40)), size)
    new = base.copy()
    for at in data.draw(st.lists(st.integers(0, size - 1), max_size=30)):
        new[at] ^= data.draw(st.integers(0, 255))
    encoded, target = delta.encode(new, base), np.full(size, 7, np.uint8)
    delta.decode(encoded, base, target)
    assert np.array_equal(target, new)

    other = base.copy()
    other[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="another base"):
        delta.decode(encoded, other, target)
    damaged = bytearray(encoded)
    damaged[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:  # a byte of zstandard's header may say what another does
        delta.decode(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]), base, target)
    except ValueError:
        return
    assert np.array_equal(target, new)


def test_names_of_files():
    path = "/dev/shm/rl-0/7-v3-rank/a[1]-v2-rank-v13-rank0.bin"
    assert version_of(Path(path)) == version_of(Path(path + ".released")) == 13
    assert version_of(Path("model-rank0.bin.lock")) == -1
    assert without_version(path) == "/dev/shm/rl-0/7-v3-rank/a[1]-v2-rank-rank0.bin"
    assert pattern_of(path) == "a[[]1]-v2-rank-v*-rank0.bin"


class Hosts:
    """Two: what `source` has is sent to `target`, under one path as far as both know."""

    def __init__(self, directory, monkeypatch):
        self.source, self.target = directory / "source", directory / "target"
        self.source.mkdir()
        self.target.mkdir()
        self.loop = asyncio.new_event_loop()
        self.requests = []
        self.address = self._served()
        monkeypatch.setattr(remote_files, "ask", self._ask)
        self.writer, self.reader = (SharedMemory(str(d), "run", True) for d in (self.source, self.target))

    def _served(self):
        async def answer(reader, writer):
            nonce, first = greeting()
            writer.write(first)
            with contextlib.closing(writer), contextlib.suppress(FileNotFoundError, ConnectionError):
                await send_file(request_of(await reader.readline(), nonce), writer)
                await writer.drain()

        async def serve():
            return await asyncio.start_server(answer, "127.0.0.1", 0)

        server = self.loop.run_until_complete(serve())
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def _ask(self, address, request, seconds):
        there = {name: request[name].replace(str(self.target), str(self.source)) for name in ("path", "base")}
        answer, connection = ask(address, {**request, **there}, seconds)
        self.requests.append((Path(request["base"]).name, answer["is_delta"]))
        return answer, connection

    def publish(self, version, data):
        shard = LocalShard("w", tuple(data.shape), (0,), data, data.dtype)
        shards = asyncio.run(self.writer.publish("model", version, 0, [shard]))
        return Manifest(version, tuple(shards))

    def fetch(self, version):
        """How many bytes came, and what is there now."""
        path = self.target / f"model-v{version}-rank0.bin"

        def reserve(partial, size, keep):
            self.reader._reserve(partial, size, str(path), keep)

        count = fetch_file(self.address, "run", str(path), reserve, with_delta=True)
        return count, torch.from_numpy(np.fromfile(path, np.uint8)).view(torch.bfloat16)

    def release(self, manifest):
        """On both."""
        asyncio.run(self.writer.release(manifest))
        for shard in manifest.shards:
            locator = shard.locator.replace(str(self.source), str(self.target))
            asyncio.run(self.reader.release(Manifest(0, (type(shard)(*_fields(shard), locator),))))


def _fields(shard):
    return shard.name, shard.dtype, shard.global_shape, shard.offsets, shard.shape


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    made = Hosts(tmp_path, monkeypatch)
    yield made
    made.loop.call_soon_threadsafe(made.loop.stop)


def changed(data, share, rng):
    """With as large a share of its values moved by one in the last place."""
    data = data.clone()
    which = torch.rand(len(data), generator=rng) < share
    data.view(torch.int16)[which] ^= 1
    return data


def weights(rng):
    return torch.randn(NUM_BYTES // 2, generator=rng).bfloat16()


def test_few_bytes_go_for_few_changes_in_at_most_three_files(hosts):
    """In the order of a synchronous run: a version is released as the next is there, then that is fetched."""
    rng = torch.Generator().manual_seed(0)
    data, before, inodes = weights(rng), None, set()
    for version in range(1, 12):
        manifest = hosts.publish(version, data)
        if before is not None:
            hosts.release(before)
        count, got = hosts.fetch(version)
        assert torch.equal(got, data)
        assert len(hosts.requests) == version * (1 + remote_files.STREAMS)
        # holds: meaning, 2% of the values are a sixteenth of the bytes at most, and a whole version is all
        assert count >= NUM_BYTES if version == 1 else 0 < count < 0.1 * NUM_BYTES
        assert hosts.fetch(version)[0] == 0  # another process of the host
        for directory in (hosts.source, hosts.target):
            files = [file for file in directory.iterdir() if ".bin" in file.name and file.suffix != ".lock"]
            assert len(files) <= 3
            inodes |= {file.stat().st_ino for file in files}
        data, before = changed(data, 0.02, rng), manifest
    assert len(inodes) <= 5  # the same ones all the while
    assert {is_delta for base, is_delta in hosts.requests if base} == {True}


def test_what_was_prefetched_does_not_come_again(hosts, monkeypatch):
    data = weights(torch.Generator().manual_seed(0))
    (shard,) = hosts.publish(1, data).shards
    locator = shard.locator.partition(AT)[2].replace(str(hosts.source), str(hosts.target))
    elsewhere = Manifest(1, (type(shard)(*_fields(shard), f"{hosts.address}{AT}{locator}"),))
    hosts.reader.prefetch(elsewhere)
    assert hosts.requests
    monkeypatch.setattr(remote_files, "ask", None)
    ((_, tensor),) = assemble(hosts.reader.fetch(elsewhere))
    assert torch.equal(tensor, data)


def test_who_missed_a_version_gets_a_whole_one(hosts):
    rng = torch.Generator().manual_seed(0)
    data, manifests = weights(rng), []
    for version in (1, 2, 3, 4):
        manifests.append(hosts.publish(version, data))
        if version > 1:
            hosts.release(manifests[-2])
        if version in (1, 4):  # what version 1 was in has become version 3
            count, got = hosts.fetch(version)
            assert torch.equal(got, data) and count >= NUM_BYTES
        data = changed(data, 0.02, rng)
    assert hosts.requests[-1] == ("model-v1-rank0.bin", False)


def test_a_base_of_the_same_name_with_other_bytes_costs_time_and_nothing_else(hosts):
    """As where a trainer was started again, and makes the version once more."""
    rng = torch.Generator().manual_seed(0)
    data = weights(rng)
    hosts.publish(1, data)
    hosts.fetch(1)
    there = hosts.target / "model-v1-rank0.bin"
    content = np.fromfile(there, np.uint8)
    content[[5, NUM_BYTES // 2]] ^= 255  # in two of four parts
    content.tofile(there)
    later = changed(data, 0.02, rng)
    hosts.publish(2, later)
    count, got = hosts.fetch(2)
    assert torch.equal(got, later) and delta.PART_BYTES < count < NUM_BYTES
    there.rename(there.with_name("model-v2-rank0.bin"))
    np.zeros(10, np.uint8).tofile(there.with_name("model-v2-rank0.bin"))  # and of another size
    hosts.publish(3, later)
    assert torch.equal(hosts.fetch(3)[1], later)


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_trainer_takes_the_base_as_it_is_used_and_what_is_left_comes_whole(hosts, monkeypatch, when):
    """Before or after a part of it was read. There are three files all the while, and no part comes twice."""
    rng = torch.Generator().manual_seed(0)
    data = weights(rng)
    first = hosts.publish(1, data)
    hosts.fetch(1)
    later = changed(data, 0.02, rng)
    hosts.publish(2, later)
    asyncio.run(hosts.writer.release(first))
    inode = (hosts.source / "model-v1-rank0.bin.released").stat().st_ino
    encode, calls = delta.encode, []

    def encode_and_publish(new, base):
        calls.append(1)
        if len(calls) == 2 and when == "before":
            hosts.publish(3, torch.zeros_like(data))
        encoded = encode(new, base)
        if len(calls) == 2 and when == "after":
            hosts.publish(3, torch.zeros_like(data))
        return encoded

    monkeypatch.setattr(remote_files, "STREAMS", 1)
    monkeypatch.setattr(delta, "encode", encode_and_publish)
    count, got = hosts.fetch(2)
    assert torch.equal(got, later) and len(calls) == 2
    assert (hosts.source / "model-v3-rank0.bin").stat().st_ino == inode
    # holds: meaning, the first part came as what changed, and the others whole: nothing came twice
    assert NUM_BYTES - delta.PART_BYTES < count < NUM_BYTES - delta.PART_BYTES // 2
    assert not hosts.fetch(3)[1].any()


def test_who_asks_and_never_reads_keeps_no_file_for_long(hosts, monkeypatch):
    """As a host that lost its power: the trainer would need another file for each."""
    monkeypatch.setattr(remote_files, "_SECONDS", 1.0)
    hosts.publish(1, weights(torch.Generator().manual_seed(0)).repeat(4))
    path = hosts.source / "model-v1-rank0.bin"
    with contextlib.closing(ask(hosts.address, {"path": str(path)}, 5.0)[1]), path.open("r+b") as file:
        assert not lock(file.fileno())  # while it is sent
        end = time.monotonic() + 30
        while not lock(file.fileno()):
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_version_that_was_released_there_is_unreachable_and_is_not_here(hosts):
    hosts.release(hosts.publish(1, weights(torch.Generator().manual_seed(0))))
    with pytest.raises(WeightsUnreachable, match="model-v1-rank0.bin could not be fetched: "):
        hosts.fetch(1)
    assert not list(hosts.target.glob("*.bin"))


def test_a_file_of_a_host_that_dies_half_way_is_not_here(tmp_path, monkeypatch):
    path = tmp_path / "model-v1-rank0.bin"
    here, there = socket.socketpair()
    there.sendall(b"half")
    there.close()
    monkeypatch.setattr(remote_files, "ask", lambda *_: ({"size": 100}, here))

    def reserve(partial, size, keep):
        Path(partial).write_bytes(bytes(size))

    with pytest.raises(WeightsUnreachable, match="fetched from host a:1: it closed the connection"):
        fetch_file("a:1", "run", str(path), reserve)
    assert not path.exists()


def test_what_was_not_prefetched_comes_as_it_is_read(hosts):
    data = weights(torch.Generator().manual_seed(0))
    (shard,) = hosts.publish(1, data).shards
    locator = shard.locator.partition(AT)[2].replace(str(hosts.source), str(hosts.target))
    elsewhere = Manifest(1, (type(shard)(*_fields(shard), f"{hosts.address}{AT}{locator}"),))
    ((_, tensor),) = assemble(hosts.reader.fetch(elsewhere))
    assert torch.equal(tensor, data)
