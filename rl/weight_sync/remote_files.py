"""Files of another host's shared memory, fetched over several connections from its `rl worker`.

A worker sends the bytes of a file as they are; or, where both hosts have the same earlier version, what
changed since (delta.py).
"""

import asyncio
import fcntl
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rl.errors import WeightsUnreachable
from rl.host_protocol import HostUnreachable, ask, line
from rl.weight_sync import delta
from rl.weight_sync.delta import Bytes
from rl.weight_sync.files import (
    RELEASED,
    hold,
    hold_released,
    names_of,
    pattern_of,
    version_of,
    without_version,
)

_SECONDS = 30.0
"""Without a byte."""
STREAMS = 4
"""Connections by which a file comes."""
_FIRST_BYTES = delta.PART_BYTES  # a file of no more takes one connection
_PART_BYTES = 2**20  # of a further one at least
_LENGTH_BYTES = 4


# ---- who wants a file


def fetch_file(
    host: str, run: str, path: str, reserve: Callable[[str, int, str], None], with_delta: bool = False
) -> int:
    """Have the host's file `path` at the same path here. Processes of this host that want it wait for one.

    reserve: makes a file of so many bytes, out of any that is released but the one named last. with_delta:
    ask for what changed, where an earlier version is here. Returns how many bytes came; 0 where it was here.

    Raises WeightsUnreachable where the file is released, or the host is gone.
    """
    common = without_version(path)
    with _locked(Path(f"{common}.lock")), ExitStack() as kept:
        if os.path.exists(path):
            return 0
        base = kept.enter_context(_earlier(path)) if with_delta else None
        try:
            count = _Fetch(host, run, path, base).into(f"{common}.partial", reserve)
        except HostUnreachable as error:
            raise WeightsUnreachable(f"weights at {path} could not be fetched: {error}") from error
        except OSError as error:
            raise WeightsUnreachable(
                f"weights at {path} could not be fetched from host {host}: {error}"
            ) from error
        os.rename(f"{common}.partial", path)
        return count


class _Fetch:
    """Of one file, over several connections."""

    def __init__(self, host: str, run: str, path: str, base: tuple[str, Bytes] | None):
        """base: the path of an earlier version that is here, and its bytes."""
        self._host, self._asked = host, {"do": "file", "run": run, "path": path}
        self._base_path, self._base = base or ("", np.empty(0, np.uint8))
        self._target = self._base

    def into(self, partial: str, reserve: Callable[[str, int, str], None]) -> int:
        """All of it, into a file of this name. How many bytes came."""
        size, is_delta, connection = self._request(0, _FIRST_BYTES, self._base_path)
        with connection:
            reserve(partial, size, self._base_path)
            with open(partial, "r+b") as file:
                self._target = _mapped(file.fileno())
            first = min(size, _FIRST_BYTES)
            count = self._take(connection, is_delta, 0, first)
        if parts := min(STREAMS, -(-(size - first) // _PART_BYTES)):
            bounds = [first + (size - first) * i // parts for i in range(parts + 1)]
            with ThreadPoolExecutor(STREAMS) as threads:
                count += sum(threads.map(self._part, bounds[:-1], bounds[1:]))
        return count

    def _request(self, begin: int, count: int, base: str) -> tuple[int, bool, socket.socket]:
        """The file's size, whether what changed comes, and where from."""
        asked = {**self._asked, "begin": begin, "count": count, "base": base}
        answer, connection = ask(self._host, asked, _SECONDS)
        return answer["size"], answer.get("is_delta", False), connection

    def _part(self, begin: int, end: int) -> int:
        _, is_delta, connection = self._request(begin, end - begin, self._base_path)
        with connection:
            return self._take(connection, is_delta, begin, end)

    def _take(self, connection: socket.socket, is_delta: bool, begin: int, end: int) -> int:
        if not is_delta:
            return _receive(connection, self._target[begin:end].data)
        try:
            return _receive_delta(connection, self._base, self._target, begin, end)
        except ValueError:  # another base of the same name: a trainer was started again
            _, _, whole = self._request(begin, end - begin, "")
            with whole:
                return _receive(whole, self._target[begin:end].data)


def _receive(connection: socket.socket, target: memoryview) -> int:
    count = 0
    while count < len(target):
        received = connection.recv_into(target[count:])
        if not received:
            raise ConnectionError("it closed the connection")
        count += received
    return count


def _receive_delta(connection: socket.socket, base: Bytes, target: Bytes, begin: int, end: int) -> int:
    """How many bytes came. Raises ValueError where the base is not the sender's."""
    if len(base) != len(target):
        raise ValueError("another base")
    count = 0
    for part in delta.parts(begin, end):
        length = bytearray(_LENGTH_BYTES)
        _receive(connection, memoryview(length))
        encoded = bytearray(int.from_bytes(length, "big"))
        count += _LENGTH_BYTES
        if not encoded:  # the sender's base is gone
            count += _receive(connection, target[part].data)
            continue
        count += _receive(connection, memoryview(encoded))
        delta.decode(bytes(encoded), base[part], target[part])
    return count


@contextmanager
def _earlier(path: str) -> Iterator[tuple[str, Bytes] | None]:
    """The newest earlier version of the file that is here, with its bytes: held until the end."""
    directory, version = Path(path).parent, version_of(Path(path))
    names = {Path(str(file).removesuffix(RELEASED)) for file in directory.glob(f"{pattern_of(path)}*")}
    earlier = [name for name in names if 0 <= version_of(name) < version]
    for name in sorted(earlier, key=version_of, reverse=True):
        try:
            file = hold_released(str(name))
        except FileNotFoundError:
            continue
        try:
            yield str(name), _mapped(file)
        finally:
            os.close(file)
        return
    yield None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


# ---- who has it


async def send_file(request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
    """Bytes `begin` to `begin + count` of the file `path`, after a line with the size of the whole.

    base: the path of an earlier version. Where that is here, and as large, what changed since is sent, part
    by part. The file takes no other version meanwhile; its base may, and what is left is then sent as it is.
    Who does not read for long loses the connection.

    Raises FileNotFoundError where the file is released.
    """
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_SECONDS * 1000))
    with ExitStack() as kept:
        file = hold(request["path"])
        kept.callback(os.close, file)
        size = os.fstat(file).st_size
        begin = request.get("begin", 0)
        end = min(begin + request.get("count", size), size)
        base = Base.open(request.get("base", ""), size)
        writer.write(line({"size": size, "is_delta": base is not None}))
        await writer.drain()
        if base is None:
            if end > begin:
                with os.fdopen(os.dup(file), "rb") as whole:
                    await asyncio.get_running_loop().sendfile(writer.transport, whole, begin, end - begin)
            return
        new = _mapped(file)
        for part in delta.parts(begin, end):
            encoded = await asyncio.to_thread(base.difference_to, new[part], part)
            writer.write(len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded)
            if not encoded:
                writer.write(new[part].data)
            await writer.drain()


class Base:
    """An earlier version of a file, which may be overwritten at any moment: it is known by its name alone."""

    def __init__(self, path: str, file: int):
        self._path, self._status = path, os.fstat(file)
        self._bytes = _mapped(file)

    @staticmethod
    def open(path: str, size: int) -> "Base | None":
        """None where it is not here, or not of this size."""
        for name in names_of(path) if path else ():
            with suppress(FileNotFoundError), open(name, "r+b") as file:
                if os.fstat(file.fileno()).st_size == size:
                    return Base(path, file.fileno())
        return None

    def difference_to(self, new: Bytes, part: slice) -> bytes:
        """What makes `new` out of this part; empty where this is another version by now."""
        encoded = delta.encode(new, self._bytes[part]) if self._is_there else b""
        return encoded if self._is_there else b""

    @property
    def _is_there(self) -> bool:
        """It gets another name before anything else is written."""
        for name in names_of(self._path):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(name), self._status):
                    return True
        return False


def _mapped(file: int) -> Bytes:
    """The file's bytes, to read and to write."""
    return np.frombuffer(mmap.mmap(file, 0), np.uint8)
