"""Weights through torchstore 0.1.2: a storage actor that every process of every host can reach.

Keys are versioned and never written twice, because putting a key again while it is read tears it.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torchstore
import torchstore.api
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import endpoint
from torchstore.controller import Controller

from rl.errors import RunError
from rl.types import PolicyVersion
from rl.weight_sync.buffers import keys, read_shards, write_shards
from rl.weight_sync.manifest import LocalShard, Manifest, Shard


def _as_async(name: str) -> Any:
    method = Controller.__dict__[name]._method

    async def wrapper(self: Controller, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return endpoint(wrapper)


class AsyncController(Controller):
    """The base class mixes sync and async endpoints, which Monarch 0.7 refuses; here all are async."""

    get_controller_strategy = _as_async("get_controller_strategy")
    keys = _as_async("keys")
    locate_volumes = _as_async("locate_volumes")
    notify_put = _as_async("notify_put")
    notify_delete = _as_async("notify_delete")


# torchstore's client in every process looks its controller up through this class.
torchstore.api.Controller = AsyncController


@dataclass(frozen=True)
class TorchStore:
    """The transport `torchstore`. Make one with `create`, in the controller's process."""

    @classmethod
    async def create(cls, storage_procs: Any) -> "TorchStore":
        """storage_procs: the mesh of one process whose memory holds the published weights."""
        await torchstore.initialize(mesh=storage_procs)
        return cls()

    async def publish(
        self, name: str, version: PolicyVersion, rank: int, shards: Iterable[LocalShard]
    ) -> list[Shard]:
        buffers: list[torch.Tensor] = []

        def allocate(num_bytes: int) -> torch.Tensor:
            buffers.append(torch.empty(num_bytes, dtype=torch.uint8))
            return buffers[0]

        published = write_shards(shards, _key(name, version, rank), allocate)
        if buffers:
            with _names_the_store():
                await torchstore.put(_key(name, version, rank), buffers[0])
        return published

    def prefetch(self, manifest: Manifest) -> None:
        """Nothing: `fetch` copies, and the generator does not decode meanwhile."""

    def fetch(self, manifest: Manifest) -> dict[str, list[tuple[Shard, torch.Tensor]]]:
        """Copies the version into this process. Raises RunError where it is gone.

        Called from a thread without an event loop.
        """
        with _names_the_store():
            return read_shards(manifest, asyncio.run(self._buffers(manifest)))

    async def release(self, manifest: Manifest) -> None:
        with _names_the_store():
            for key in keys(manifest):
                await torchstore.delete(key)

    async def _buffers(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        for key in keys(manifest):
            if not await torchstore.exists(key):
                raise RunError(
                    f"policy version {manifest.version} was released before it was read ({key} is gone)"
                )
        return {key: await torchstore.get(key) for key in keys(manifest)}


@contextmanager
def _names_the_store() -> Iterator[None]:
    """What uses the store is not to blame for its death."""
    try:
        yield
    except SupervisionError as death:
        raise RunError(
            "the process of torchstore died, and with it the published weights; see logs/torchstore.log of "
            "the run"
        ) from death


def _key(name: str, version: PolicyVersion, rank: int) -> str:
    return f"{name}.v{version}.rank{rank}"
