"""Suspension: tensors that give their device's memory back, and get it again with what they held.

The tensors stay the same objects: only the storages behind them are emptied. What they held goes to the
host's memory, page-locked, where the device is a GPU; where it is the host, to a file without a name.
"""

import ctypes
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from rl.errors import RunError, one_line
from rl.models.learner import local

_LEAST_PART_BITS = 20


class _Stash(Protocol):
    """Holds what storages held. They come back in the order in which they were put."""

    def put(self, storage: torch.UntypedStorage) -> None: ...
    def rewind(self) -> None: ...
    def take(self, storage: torch.UntypedStorage) -> None: ...


class _File:
    """Gone with its process, whatever happens."""

    def __init__(self, directory: Path):
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115

    def put(self, storage: torch.UntypedStorage) -> None:
        self._file.write(_memory_of(storage))

    def rewind(self) -> None:
        self._file.seek(0)

    def take(self, storage: torch.UntypedStorage) -> None:
        view = _memory_of(storage)
        while len(view):
            if not (count := self._file.readinto(view)):  # type: ignore[attr-defined]
                raise OSError("the file of what was suspended has ended early")
            view = view[count:]


class _Host:
    """Page-locked memory, which is kept for the next time: to lock it takes longer than to copy."""

    def __init__(self) -> None:
        self._held: list[list[torch.Tensor]] = []  # of each storage, one part after the other
        self._next = 0

    def put(self, storage: torch.UntypedStorage) -> None:
        values = _bytes_of(storage)
        sizes = parts_of(len(values))
        if self._next == len(self._held) or sum(map(len, self._held[self._next])) != len(values):
            self._held[self._next :] = [
                [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            ]
        for part, value in zip(self._held[self._next], values.split(sizes), strict=True):
            part.copy_(value, non_blocking=True)
        self._next += 1

    def rewind(self) -> None:
        torch.cuda.synchronize()
        self._next = 0

    def forget(self) -> None:
        self._held, self._next = [], 0

    def take(self, storage: torch.UntypedStorage) -> None:
        values = _bytes_of(storage).split([len(part) for part in self._held[self._next]])
        for value, part in zip(values, self._held[self._next], strict=True):
            value.copy_(part, non_blocking=True)
        self._next += 1


def parts_of(num_bytes: int) -> list[int]:
    """Powers of two, and what is left of a MiB.

    torch locks memory in blocks of a power of two: one part of 9 GiB would take 16.
    """
    parts = [
        1 << bit for bit in reversed(range(_LEAST_PART_BITS, num_bytes.bit_length())) if num_bytes >> bit & 1
    ]
    rest = num_bytes - sum(parts)
    return [*parts, rest] if rest else parts


class Suspension:
    """Of one process's tensors."""

    def __init__(self, device: torch.device):
        self._device = device
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        self._stash: _Stash | None = None
        self._host = _Host()

    @property
    def is_suspended(self) -> bool:
        return self._stash is not None

    def suspend(self, tensors: Iterable[torch.Tensor], directory: Path) -> None:
        """directory: for the file. Does nothing where they are suspended. All or nothing.

        Raises RunError where there is no room for what they hold.
        """
        if self.is_suspended:
            return
        on_host = self._device.type == "cpu"
        storages = _storages(tensors, self._device)
        try:
            stash: _Stash = _File(directory) if on_host else self._host
            for storage in storages:
                stash.put(storage)
            stash.rewind()
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's, of memory that cannot be locked
            self._host.forget()
            place = f"in {directory}" if on_host else "in the host's memory"
            raise RunError(f"there is no room {place} for what is suspended ({error}); make room") from error
        self._emptied = [(storage, storage.nbytes()) for storage in storages]
        self._stash = stash
        for storage in storages:
            storage.resize_(0)
        give_back(self._device)

    def resume(self) -> None:
        """Does nothing where they are not suspended. All or nothing: they may be resumed again.

        Raises RunError where the device has no room for them.
        """
        if self._stash is None:
            return
        try:
            for storage, size in self._emptied:
                storage.resize_(size)
        except RuntimeError as error:  # torch's, of a device or a host without room
            for storage, _ in self._emptied:
                storage.resize_(0)
            give_back(self._device)
            raise RunError(
                f"{self._device} has no room for what was suspended ({one_line(error):.200}); "
                f"leave more of it free, as by a smaller generator.kv_cache_gib"
            ) from error
        for storage, _ in self._emptied:
            self._stash.take(storage)
        if self._stash is self._host:
            self._host.rewind()
        self._stash, self._emptied = None, []

    def require(self, verb: str) -> None:
        """Raises RunError where a verb needs what is suspended."""
        if self.is_suspended:
            raise RunError(f"{verb}: the engine is suspended; resume() it first")


def give_back(device: torch.device) -> None:
    """What is free goes from the allocator to the device, or from the process to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with suppress(AttributeError, OSError):  # a C library of another kind
        ctypes.CDLL(None).malloc_trim(0)


def _storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Those on the device, each once, but for those of files that are mapped."""
    storages: dict[Any, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        if storage.nbytes() and storage.resizable() and storage.device.type == device.type:
            storages.setdefault(storage._cdata, storage)
    return [*storages.values()]


def _memory_of(storage: torch.UntypedStorage) -> memoryview:
    """On the host. Not by numpy: torch empties no storage that numpy has seen."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
