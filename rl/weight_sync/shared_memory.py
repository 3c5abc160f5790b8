"""Weights through files in shared memory: the fastest way between processes of one host.

Each rank writes one file for each version, `<directory>/<name>-v<version>-rank<rank>.bin`; readers map it and
copy from it.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from rl.errors import RunError
from rl.types import PolicyVersion
from rl.weight_sync.buffers import keys, read_shards, write_shards
from rl.weight_sync.manifest import LocalShard, Manifest, Shard


@dataclass(frozen=True)
class SharedMemory:
    """The transport `shared_memory`. Picklable: every process that gets one uses the same directory."""

    directory: str

    async def publish(
        self, name: str, version: PolicyVersion, rank: int, shards: Iterable[LocalShard]
    ) -> list[Shard]:
        """Write this rank's shards. Raises RunError where the host's shared memory is too small."""
        path = str(self._path(name, version, rank))

        def allocate(num_bytes: int) -> torch.Tensor:
            _reserve(path, num_bytes)
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)

        return write_shards(shards, path, allocate)

    def fetch(self, manifest: Manifest) -> dict[str, list[tuple[Shard, torch.Tensor]]]:
        """Map the version's files.

        The tensors are views, valid until the last of them is dropped, even after `release`. Raises RunError
        where the version was released already.
        """
        buffers = {}
        for path in keys(manifest):
            if not os.path.exists(path):
                raise RunError(
                    f"policy version {manifest.version} was released before it was read ({path} is gone); "
                    f"fetch sooner"
                )
            buffers[path] = torch.from_file(path, shared=True, size=os.path.getsize(path), dtype=torch.uint8)
        return read_shards(manifest, buffers)

    async def release(self, manifest: Manifest) -> None:
        """Who has mapped the version keeps it until it drops its views."""
        for path in keys(manifest):
            Path(path).unlink(missing_ok=True)

    def _path(self, name: str, version: PolicyVersion, rank: int) -> Path:
        return Path(self.directory) / f"{name}-v{version}-rank{rank}.bin"


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
            f"enlarge it (docker run --shm-size=...) or use --weight_sync.transport torchstore"
        ) from error
    finally:
        os.close(file)
