"""A run's directory on a host that does not share the controller's: models are sent there, logs come back."""

import asyncio
import base64
import glob
import hashlib
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rl.host_protocol import (
    HostRefuses,
    HostUnreachable,
    Refusal,
    ask,
    checked,
    line,
    read_line,
    unreachable,
)
from rl.paths import lock
from rl.waiting import within

_OWNER = ".sent"
_MOST_LOG_BYTES = 2**18  # of a file, at a time
_MOST_NEWS_BYTES = 2**22  # of all: an answer is one line, and the next one comes a second later
_SECONDS = 60.0  # without a byte
_LOOK_SECONDS = 600.0  # to read a file that is there already
_LEFT_SECONDS = 3600.0  # in which a transfer that goes on has written
_CHUNK = 2**20
Connected = Callable[[socket.socket], None]


class OwnDirectory:
    """A directory at the same path, for one run. What a worker that was killed has left there is removed."""

    def __init__(self, directory: Path, run: str):
        """Raises OSError; FileExistsError where something else is there."""
        self._directory, self._kept = directory, ExitStack()
        self._sent: dict[Path, int] = {}  # log -> bytes that have been told
        owner = directory / _OWNER
        directory.mkdir(parents=True, exist_ok=True)  # first: NFS may not see for a while that it is there
        if any(directory.iterdir()) and not owner.exists():
            raise FileExistsError(f"{directory} is there and has other files")
        self._owner = file = self._kept.enter_context(owner.open("a+"))
        is_locked = lock(file.fileno())
        file.seek(0)
        other_run, _, host = file.read().strip().rpartition(" ")
        if other_run == run and host != socket.gethostname():
            self._kept.close()
            raise FileExistsError(f"{host} of this run has {directory}, too, and the controller has not")
        if not is_locked:
            self._kept.close()
            raise FileExistsError(f"{directory} is another run's")
        file.truncate(0)
        print(run, socket.gethostname(), file=file, flush=True)
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        (directory / "logs").mkdir()

    def news(self) -> list[list[str]]:
        """[name, base64] of what was added to logs since the last call."""
        return [[path.name, base64.b64encode(text).decode()] for path, text in self._added()]

    def _added(self) -> Iterator[tuple[Path, bytes]]:
        """Those first of which least was told."""
        left = _MOST_NEWS_BYTES
        logs = (self._directory / "logs").glob("*.log")
        for path in sorted(logs, key=lambda path: (self._sent.get(path, -1), path)):
            with path.open("rb") as file:
                file.seek(self._sent.get(path, 0))
                text = file.read(min(left, _MOST_LOG_BYTES))
                if text or path not in self._sent:
                    self._sent[path] = file.tell()
                    left -= len(text)
                    yield path, text

    def remove(self) -> None:
        """Another file system may have been mounted there meanwhile: what is not the run's stays."""
        with suppress(OSError):
            if os.path.samestat((self._directory / _OWNER).stat(), os.fstat(self._owner.fileno())):
                shutil.rmtree(self._directory, ignore_errors=True)
        self._kept.close()


async def receive_file(
    request: Mapping[str, Any],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    is_leased: Callable[[], bool],
) -> None:
    """The worker's side of `send_files`: says whether it is wanted, takes it, and says that it is there.

    is_leased: whether the run still has this host. Raises Refusal where the file cannot be here. Hosts that
    share a file system may take the same file at once: each writes one of its own, and the last has the name.
    """
    path, size = Path(request["path"]), int(request["size"])
    with _refusing(path):
        if path.exists():
            status = path.stat()
            same = path.is_file() and (status.st_size, status.st_mtime_ns) == (size, request["time"])
            digest_here = await asyncio.to_thread(_digest, path) if path.is_file() and not same else ""
            writer.write(line({"wanted": False, "is_same": same, "digest": digest_here}))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(path)
        if size > (free := shutil.disk_usage(path.parent).free):
            needed = f"{size / 1e9:.1f} GB, and {free / 1e9:.1f} are free"
            raise Refusal(f"has no room for {path} ({needed}); make room there")
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
        file = partial.open("xb")
    try:
        with file:
            writer.write(line({"wanted": True}))
            while size > 0:
                part = await _read(reader, size)
                if not part or not is_leased():
                    raise ConnectionError("it closed the connection")
                size -= len(part)
                try:
                    with _refusing(path):
                        file.write(part)
                except Refusal:
                    await _drop(reader, size)  # who still sends would not read why
                    raise
        with _refusing(path):
            os.utime(partial, ns=(request["time"],) * 2)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    writer.write(line({}))


def _remove_left(path: Path) -> None:
    """What killed transfers of this file left here: nobody has written to it for an hour."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > _LEFT_SECONDS:
                partial.unlink()


async def _drop(reader: asyncio.StreamReader, size: int) -> None:
    """What is still sent of a file."""
    while size > 0 and (part := await _read(reader, size)):
        size -= len(part)


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    """Some of so many bytes. Raises TimeoutError."""
    async with within(_SECONDS):
        return await reader.read(min(size, _CHUNK))


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """What this host's file system says no to is told to who asked."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"cannot take {path} ({error.strerror}); make room, or permit it, there") from error


def _digest(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def send_files(address: str, run: str, directory: Path, connected: Connected = lambda _: None) -> int:
    """Every file below, to the same path on that host, but for those that it has. How many bytes went.

    A file of the same size and time is taken for the same, as it is where hosts share it. connected: called
    with each socket, which another thread may shut down.

    Raises HostUnreachable.
    """
    count = 0
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            count += _send(address, run, path, connected)
    return count


def _send(address: str, run: str, path: Path, connected: Connected) -> int:
    try:
        size, changed = path.stat().st_size, path.stat().st_mtime_ns
        file = path.open("rb")
    except OSError as error:
        raise HostUnreachable(
            f"{path}, which host {address} needs, cannot be read here ({error.strerror}); permit it"
        ) from error
    with file:
        return _send_opened(address, run, path, file, size, changed, connected)


def _send_opened(
    address: str, run: str, path: Path, file: BinaryIO, size: int, changed: int, connected: Connected
) -> int:
    request = {"do": "put", "run": run, "path": str(path.absolute()), "size": size, "time": changed}
    answer, connection = ask(address, request, _LOOK_SECONDS, connected)
    try:
        with connection:
            if not answer["wanted"]:
                if not answer["is_same"] and answer["digest"] != _digest(path):
                    raise HostRefuses(
                        f"host {address} has another {path}, which the run would send; remove it there, "
                        f"or share it"
                    )
                return 0
            connection.settimeout(_SECONDS)
            connection.sendfile(file)
            if not (text := read_line(connection)):
                raise ConnectionError(f"{path} did not arrive")
            checked(address, text)
        return size
    except OSError as error:
        raise HostUnreachable(unreachable(address, error)) from error
