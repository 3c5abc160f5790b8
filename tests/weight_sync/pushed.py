"""A second transport: who learns sends a version to everybody that has asked for one before; others come and take it.

It needs no verb that Transport lacks. A receiver joins by its first `fetch`. One that is started again is not among those that are sent
to, and pulls. A dead sender's versions cannot be reached: the trainer's next ones can.
"""

import asyncio
import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from rl.errors import RunError, WeightsUnreachable
from rl.weight_sync.buffers import keys, read_shards, write_shards
from rl.weight_sync.manifest import LocalShard, Manifest, Shard

_AT = "|"  # between a sender's socket and what it calls the buffer
_SECONDS = 30.0


@dataclass(frozen=True)
class Pushed:
    """directory: of the sockets of all processes of a run."""

    directory: str

    async def publish(self, name: str, version: int, rank: int, shards: Iterable[LocalShard]) -> list[Shard]:
        process, buffer_name = _process(self.directory), f"{name}-v{version}-rank{rank}"

        def allocate(size: int) -> torch.Tensor:
            process.buffers[buffer_name] = torch.empty(size, dtype=torch.uint8)
            return process.buffers[buffer_name]

        published = write_shards(shards, f"{process.address}{_AT}{buffer_name}", allocate)
        if published:
            data = process.buffers[buffer_name].numpy()
            await asyncio.to_thread(process.push, buffer_name, data)
        return published

    def prefetch(self, manifest: Manifest) -> None:
        """Nothing: it was pushed."""

    def fetch(self, manifest: Manifest) -> dict[str, list[tuple[Shard, torch.Tensor]]]:
        process = _process(self.directory)
        process.join()
        buffers = {}
        for key in keys(manifest):
            sender, _, name = key.partition(_AT)
            arrived = process.buffers.get(name)
            buffers[key] = process.pull(sender, name) if arrived is None else arrived
            process.counts["pulled" if arrived is None else "pushed"] += 1
        for name in [
            n for n in list(process.buffers) if _version(n) < manifest.version and process.is_receiver
        ]:
            del process.buffers[name]
        print(f"weights: {process.counts}", flush=True)
        return read_shards(manifest, buffers)

    async def release(self, manifest: Manifest) -> None:
        for key in keys(manifest):
            sender, _, name = key.partition(_AT)
            with suppress(OSError):  # a dead sender holds nothing
                await asyncio.to_thread(_ask, sender, ("drop", name))


def _version(name: str) -> int:
    return int(name.rpartition("-rank")[0].rpartition("-v")[2])


class _Process:
    """What this process has, and a thread that others ask."""

    def __init__(self, directory: Path):
        self.directory, self.buffers = directory, dict[str, torch.Tensor]()
        self.is_receiver, self.counts = False, {"pushed": 0, "pulled": 0}
        self.address = str(directory / f"{os.getpid()}.socket")
        self._listener = socket.socket(socket.AF_UNIX)
        with _short(self.address) as address:
            self._listener.bind(address)
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def join(self) -> None:
        self.is_receiver = True
        Path(f"{self.address}.receiver").touch()

    def push(self, name: str, data: memoryview) -> None:
        for file in self.directory.glob("*.receiver"):
            try:
                _ask(str(file).removesuffix(".receiver"), ("put", name), data)
            except OSError:  # it has died: it will come and take what it needs
                file.unlink(missing_ok=True)

    def pull(self, sender: str, name: str) -> torch.Tensor:
        try:
            data = _ask(sender, ("get", name))
        except OSError as error:
            raise WeightsUnreachable(f"{name} is with a process that is gone") from error
        if not data:
            raise RunError(f"{name} was released before it was read; fetch sooner")
        return torch.frombuffer(data, dtype=torch.uint8)

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, suppress(OSError, EOFError):
                connection.settimeout(_SECONDS)
                verb, name = pickle.loads(_receive(connection))
                if verb == "put":
                    self.buffers[name] = torch.frombuffer(_receive(connection), dtype=torch.uint8)
                elif verb == "drop":
                    self.buffers.pop(name, None)
                buffer = self.buffers.get(name) if verb == "get" else None
                _send(connection, b"" if buffer is None else buffer.numpy())


@contextmanager
def _short(address: str) -> Iterator[str]:
    """Another name of a socket: of a path it takes 107 bytes, and a directory for temporary files may have more."""
    directory, name = os.path.split(address)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _ask(address: str, question: tuple[str, str], data: memoryview | None = None) -> bytearray:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        with _short(address) as name:
            connection.connect(name)
        _send(connection, pickle.dumps(question))
        if data is not None:
            _send(connection, data)
        return _receive(connection)


def _send(connection: socket.socket, data) -> None:
    view = memoryview(data).cast("B")
    connection.sendall(struct.pack("<Q", len(view)))
    connection.sendall(view)


def _receive(connection: socket.socket) -> bytearray:
    (size,) = struct.unpack("<Q", _exactly(connection, 8))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


_processes: dict[tuple[int, str], _Process] = {}


def _process(directory: str) -> _Process:
    key = os.getpid(), directory
    if key not in _processes:
        _processes[key] = _Process(Path(directory))
    return _processes[key]


def main() -> None:
    """`rl`, with this transport."""
    from rl import cli
    from rl.cluster import launch
    from tests.weight_sync import pushed  # not __main__, which other processes do not have

    launch.SharedMemory = lambda directory, run, delta: pushed.Pushed(directory)
    cli.main()


if __name__ == "__main__":
    main()
