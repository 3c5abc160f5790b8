"""A run's directory on a host that does not share the controller's: models are sent there, logs come back."""

import asyncio
import base64
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl.host_protocol import HostRefuses, HostUnreachable, ask, line, unreachable
from rl.paths import lock, whole_file

_OWNER = ".sent"
_MOST_LOG_BYTES = 2**18  # of a file, at a time
_SECONDS = 60.0  # without a byte
_LOOK_SECONDS = 600.0  # to read a file that is there already
_CHUNK = 2**20


class OwnDirectory:
    """A directory at the same path, for one run. What a worker that was killed has left there is removed."""

    def __init__(self, directory: Path):
        """Raises OSError; FileExistsError where something else is there."""
        self._directory, self._kept = directory, ExitStack()
        self._sent: dict[Path, int] = {}  # log -> bytes that have been told
        owner = directory / _OWNER
        if directory.exists() and any(directory.iterdir()) and not owner.exists():
            raise FileExistsError(f"{directory} is there and has other files")
        directory.mkdir(parents=True, exist_ok=True)
        file = self._kept.enter_context(owner.open("a+"))
        if not lock(file.fileno()):
            raise FileExistsError(f"{directory} is another run's")
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        (directory / "logs").mkdir()

    def news(self) -> list[list[str]]:
        """[name, base64] of what was added to logs since the last call."""
        return [[path.name, base64.b64encode(text).decode()] for path, text in self._added()]

    def _added(self) -> Iterator[tuple[Path, bytes]]:
        for path in sorted((self._directory / "logs").glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._sent.get(path, 0))
                text = file.read(_MOST_LOG_BYTES)
                if text or path not in self._sent:
                    self._sent[path] = file.tell()
                    yield path, text

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._kept.close()


async def receive_file(
    request: Mapping[str, Any],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    is_leased: Callable[[], bool],
) -> None:
    """The worker's side of `send_files`: says whether it is wanted, takes it, and says that it is there.

    is_leased: whether the run still has this host.
    """
    path, size = Path(request["path"]), int(request["size"])
    if path.exists():
        same = path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (size, request["time"])
        there = await asyncio.to_thread(_digest, path) if path.is_file() and not same else ""
        writer.write(line({"wanted": False, "is_same": same, "digest": there}))
        return
    writer.write(line({"wanted": True}))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, durable=False) as file:
        while size > 0:
            part = await asyncio.wait_for(reader.read(min(size, _CHUNK)), _SECONDS)
            if not part or not is_leased():
                raise ConnectionError("it closed the connection")
            file.write(part)
            size -= len(part)
    os.utime(path, ns=(request["time"],) * 2)
    writer.write(b"\n")


def _digest(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def send_files(address: str, run: str, directory: Path) -> int:
    """Every file below, to the same path on that host, but for those that it has. How many bytes went.

    A file of the same size and time is taken for the same, as it is where hosts share it.

    Raises HostUnreachable.
    """
    count = 0
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            count += _send(address, run, path)
    return count


def _send(address: str, run: str, path: Path) -> int:
    size, changed = path.stat().st_size, path.stat().st_mtime_ns
    request = {"do": "put", "run": run, "path": str(path.absolute()), "size": size, "time": changed}
    answer, connection = ask(address, request, _LOOK_SECONDS)
    try:
        with connection, path.open("rb") as file:
            if not answer["wanted"]:
                if not answer["is_same"] and answer["digest"] != _digest(path):
                    raise HostRefuses(
                        f"host {address} has another {path}, which the run would send; remove it there, "
                        f"or share it"
                    )
                return 0
            connection.sendfile(file)
            if connection.recv(1) != b"\n":
                raise ConnectionError(f"{path} did not arrive")
        return size
    except OSError as error:
        raise HostUnreachable(unreachable(address, error)) from error
