"""Weights through files in shared memory: the fastest way between processes of one host.

Each rank writes one file for each version, `<directory>/<name>-v<version>-rank<rank>.bin`; readers map it and
copy from it. On a host without the rank, the first reader fetches the file. A file that is released, and that
nobody has mapped any more, takes a later version: its pages are there already, and mapped by the rank. So a
run has three files of a name and rank on a host at most, the same ones.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path

import torch

from rl.errors import RunError
from rl.host_protocol import own_host
from rl.types import PolicyVersion
from rl.weight_sync.buffers import keys, read_shards, write_shards
from rl.weight_sync.files import (
    AT,
    RELEASED,
    hold,
    parts_of,
    pattern_of,
    release_files,
    release_version,
    version_of,
)
from rl.weight_sync.manifest import LocalShard, Manifest, Shard
from rl.weight_sync.remote_files import fetch_file


@dataclass(frozen=True)
class SharedMemory:
    """The transport `shared_memory`. Picklable: every process that gets one uses the same directory.

    run: what the hosts' workers call the run, where it has several hosts. with_delta: between hosts goes what
    changed since the version before.
    """

    directory: str
    run: str = ""
    with_delta: bool = False

    async def publish(
        self, name: str, version: PolicyVersion, rank: int, shards: Iterable[LocalShard]
    ) -> list[Shard]:
        """Write this rank's shards. Raises RunError where the host's shared memory is too small.

        Later versions than this one are nobody's: a rank that died had begun to write them.
        """
        path = str(self._path(name, version, rank))
        files = Path(self.directory).glob(f"{escape(name)}-v*-rank*.bin")
        release_files(str(file) for file in files if version_of(file) > version)

        def allocate(num_bytes: int) -> torch.Tensor:
            self._reserve(path, num_bytes)
            return _mapped(path, num_bytes)

        key = f"{own_host()}{AT}{path}" if self.run else path
        return write_shards(shards, key, allocate)

    def _reserve(self, path: str, num_bytes: int, version_path: str = "", keep: str = "") -> None:
        """A file of this size: the oldest that was released, or a new one.

        version_path: the name that it will have, where that is another. keep: this one is not taken.
        """
        pattern = pattern_of(version_path or path)
        released = sorted(Path(self.directory).glob(f"{pattern}{RELEASED}"), key=version_of)
        old = [file for file in released if str(file) != f"{keep}{RELEASED}"]
        if not any(_take(file, path, num_bytes) for file in old):
            _reserve(path, num_bytes)

    def prefetch(self, manifest: Manifest) -> None:
        """Bring the files of another host. Raises WeightsUnreachable."""
        for key in keys(manifest):
            self._bring(*parts_of(key))

    def fetch(self, manifest: Manifest) -> dict[str, list[tuple[Shard, torch.Tensor]]]:
        """Map the version's files.

        The tensors are views, valid until the last of them is dropped, even after `release`. Raises RunError
        where the version was released already.
        """
        buffers = {}
        for key in keys(manifest):
            host, path = parts_of(key)
            try:
                self._bring(host, path)
                buffers[key] = _held(path)
            except FileNotFoundError as error:
                raise RunError(
                    f"policy version {manifest.version} was released before it was read ({path} is gone); "
                    f"fetch sooner"
                ) from error
        return read_shards(manifest, buffers)

    async def release(self, manifest: Manifest) -> None:
        """On this host. Who has mapped the version keeps it until it drops its views."""
        release_version(Path(self.directory), keys(manifest))

    def _bring(self, host: str, path: str) -> None:
        """Raises WeightsUnreachable where it is on another host and cannot be fetched."""
        if host not in ("", own_host()) and not os.path.exists(path):

            def reserve(partial: str, size: int, keep: str) -> None:
                self._reserve(partial, size, path, keep)

            count = fetch_file(host, self.run, path, reserve, self.with_delta)
            if count:  # no other process of this host was first
                size = os.stat(path).st_size
                print(f"{Path(path).name}: {count / 1e6:.1f} MB of {size / 1e6:.1f} came", flush=True)

    def _path(self, name: str, version: PolicyVersion, rank: int) -> Path:
        return Path(self.directory) / f"{name}-v{version}-rank{rank}.bin"


_own: dict[tuple[int, int], torch.Tensor] = {}
"""(device, inode) -> what this process has mapped to write to."""


def _mapped(path: str, num_bytes: int) -> torch.Tensor:
    """The file's bytes, to write to. Mapped once, with all of its pages."""
    inodes = set()
    for file in Path(path).parent.iterdir():
        with suppress(FileNotFoundError):  # another rank's file may change its name at any moment
            inodes.add(_inode(file))
    for gone in _own.keys() - inodes:
        del _own[gone]
    inode = _inode(path)
    if inode not in _own:
        _own[inode] = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    return _own[inode]


def _inode(path: str | Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _held(path: str) -> torch.Tensor:
    """The file's bytes, to read. Nobody writes there until the last view is dropped, or the process is gone.

    Raises FileNotFoundError where it is released.
    """
    file = hold(path)
    try:
        mapped = mmap.mmap(file, 0)
    except BaseException:
        os.close(file)
        raise
    weakref.finalize(mapped, os.close, file)  # which lets go of the lock
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _take(released: Path, path: str, num_bytes: int) -> bool:
    """Whether the released file is the new version's now. One of another size, or still read, is removed."""
    try:
        file = os.open(released, os.O_RDWR)
    except FileNotFoundError:  # it was of a rank that an older version does not have
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_size == num_bytes:
            released.rename(path)
            return True
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        os.close(file)
    released.unlink(missing_ok=True)
    return False


def _reserve(path: str, num_bytes: int) -> None:
    """Take the memory before it is written to.

    Otherwise a write past the end of the file system would be a SIGBUS, not an error.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        os.unlink(path)
        raise RunError(
            f"no room in shared memory for {num_bytes >> 20} MiB of weights at {path} ({error.strerror}); "
            f"enlarge it (docker run --shm-size=..., --kubernetes.shared_memory_gib), or let rl train do "
            f"without it by --weight_sync.transport torchstore"
        ) from error
    finally:
        os.close(file)
