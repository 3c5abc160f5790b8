"""Files of another host's shared memory, fetched over several connections from its `rl worker`."""

import fcntl
import mmap
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from rl.errors import WeightsUnreachable
from rl.host_protocol import HostUnreachable, ask

_SECONDS = 30.0
"""Without a byte."""
_STREAMS = 4
_FIRST_BYTES = 2**22  # a file of no more takes one connection
_PART_BYTES = 2**20  # of a further one at least
AT = "!"  # between a host and a path
RELEASED = ".released"
"""At the end of the name of a file that may take another version."""


def fetch_file(host: str, run: str, path: str, reserve: Callable[[str, int], None]) -> None:
    """Have the host's file `path` at the same path here. Processes of this host that want it wait for one.

    reserve: makes a file of so many bytes. Raises WeightsUnreachable where the file is released, or the host
    is gone.
    """
    with _locked(Path(re.sub(r"-v\d+-", "-", path) + ".lock")):
        if os.path.exists(path):
            return
        partial = re.sub(r"-v\d+-", "-", path) + ".partial"
        try:
            _fetch(host, run, path, partial, reserve)
        except HostUnreachable as error:
            raise WeightsUnreachable(f"weights at {path} could not be fetched: {error}") from error
        except OSError as error:
            raise WeightsUnreachable(
                f"weights at {path} could not be fetched from host {host}: {error}"
            ) from error
        os.rename(partial, path)


def _fetch(host: str, run: str, path: str, partial: str, reserve: Callable[[str, int], None]) -> None:
    def request(begin: int, count: int) -> tuple[int, socket.socket]:
        asked = {"do": "file", "run": run, "path": path, "begin": begin, "count": count}
        answer, connection = ask(host, asked, _SECONDS)
        return answer["size"], connection

    size, connection = request(0, _FIRST_BYTES)
    with connection:
        reserve(partial, size)
        with (
            open(partial, "r+b") as file,
            mmap.mmap(file.fileno(), size) as mapped,
            memoryview(mapped) as view,
        ):
            first = min(size, _FIRST_BYTES)
            _receive(connection, view[:first])

            def receive(begin: int, end: int) -> None:
                _, connection = request(begin, end - begin)
                with connection:
                    _receive(connection, view[begin:end])

            parts = min(_STREAMS, -(-(size - first) // _PART_BYTES))
            bounds = [first + (size - first) * i // max(1, parts) for i in range(parts + 1)]
            if parts:
                with ThreadPoolExecutor(_STREAMS) as threads:
                    list(threads.map(receive, bounds[:-1], bounds[1:]))


def _receive(connection: socket.socket, target: memoryview) -> None:
    with target:
        count = 0
        while count < len(target):
            received = connection.recv_into(target[count:])
            if not received:
                raise ConnectionError("it closed the connection")
            count += received


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def release_files(released: Iterable[str]) -> None:
    """Those of these files that are on this host. released: of a manifest's keys."""
    for key in released:
        _, path = parts_of(key)
        with suppress(FileNotFoundError):
            os.rename(path, f"{path}{RELEASED}")


def parts_of(key: str) -> tuple[str, str]:
    """The host that wrote it, empty where there is one alone, and the path."""
    host, _, path = key.rpartition(AT)
    return host, path
