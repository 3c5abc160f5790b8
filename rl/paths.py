"""Paths that a user gives: can they be paths, can a directory be made there, who has it; and whole files."""

import errno
import fcntl
import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rl.errors import ConfigError

LOCK = ".lock"
_LONGEST_PATH, _LONGEST_NAME = 3900, 255  # bytes; logs and checkpoints add to the path
_OF_DISKS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "is full; make room"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "fails; see to it"),
    errno.EROFS: "may only be read; mount it anew",
}


def disk_failure(error: OSError, directory: Path) -> str:
    """What is wrong with the disk of this directory, with the remedy; empty where the error is another."""
    if error.errno not in _OF_DISKS:
        return ""
    return f"the disk of {error.filename or directory} {_OF_DISKS[error.errno]}"


def why_no_path(path: str) -> str:
    """Why no file can have this name, with the remedy; empty where one can."""
    if "\0" in path:
        return "holds a NUL character, which no path does; leave it out"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "holds a control character, which logs and shells would not show; leave it out"
    names = [os.fsencode(name) for name in path.split(os.sep)]
    if len(os.fsencode(path)) > _LONGEST_PATH or max(map(len, names)) > _LONGEST_NAME:
        return "is longer than a path may be; give a shorter one"
    return ""


def why_not_made(path: str) -> str:
    """Why a new directory cannot be made here, with the remedy; empty where it can, or is, empty."""
    if why := why_no_path(path):
        return why
    existing = os.path.abspath(path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        kind = "a file" if os.path.exists(existing) else "a link to nothing"
        return f"cannot be made: {existing} is {kind}; give another directory"
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        return f"cannot be made: {existing} may not be written to; give another directory"
    if existing == os.path.abspath(path) and os.listdir(existing):
        return "exists and is not empty; give another directory"
    return ""


def run_directory(asked: str, name: str) -> Path:
    """Made: the directory that is asked for, or else a new one below runs/, with the time in its name."""
    if not asked:
        return new_directory(Path("runs", dated(name)))
    Path(asked).mkdir(parents=True, exist_ok=True)
    return Path(asked)


def dated(name: str) -> str:
    """The name of a directory of runs/."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def new_directory(path: Path) -> Path:
    """This one, or one with a number behind its name: no other call makes it, at the same moment either."""
    for number in itertools.count(1):
        directory = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            directory.mkdir(parents=True)
            return directory
        except FileExistsError:
            if not os.path.lexists(directory):  # one above it is a link to nothing
                raise
    raise AssertionError("itertools.count has no end")


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """The file has its name only once it is complete; makes its directory. durable: see whole_file."""
    with whole_file(path, durable=durable) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """As write_whole, for content that is written in pieces.

    durable: also where the machine stops right after, at the cost of waiting for the disk.
    """
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        yield file
    if durable:
        sync(partial)
    partial.replace(path)
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a directory's names. Blocks until it does."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(directory: Path) -> None:
    """Have the disk hold a directory's files and its name. What is in subdirectories is not synced."""
    for file in directory.iterdir():
        sync(file)
    sync(directory)
    sync(directory.parent)


class NoLocks(OSError):
    """The file system has no flock."""


def lock(file: int) -> bool:
    """Whether the open file is now locked for this process, until it is closed; else another has it.

    Raises NoLocks on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise NoLocks(error.errno, f"its file system has no locks (flock: {error.strerror})") from error
    return True


def lock_directory(directory: Path, owner: str, patience: float = 0.0) -> int:
    """A file descriptor that keeps the directory for this process until it is closed, or the process ends.

    owner: what has it, for people. patience: seconds for which another process may still have it. Raises
    ConfigError where it has it then, or nothing can be locked.
    """
    file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    end = time.monotonic() + patience
    try:
        while not (is_locked := lock(file)) and time.monotonic() < end:
            time.sleep(min(1.0, patience))
    except NoLocks as error:
        os.close(file)
        raise ConfigError(
            f"the {owner}'s directory {directory} cannot be kept from others: {error.strerror}; give a "
            f"directory on a local disk, or mount the file system with locks"
        ) from error
    if not is_locked:
        pid, _, host = os.read(file, 300).decode(errors="replace").strip().partition(" on ")
        where = f" on {host}" if host not in ("", socket.gethostname()) else ""
        os.close(file)
        raise ConfigError(
            f"the {owner}'s directory {directory} belongs to a {owner} that is under way (pid {pid}{where}); "
            f"wait for it, end it, or give another directory"
        )
    os.truncate(file, 0)
    os.write(file, f"{os.getpid()} on {socket.gethostname()}\n".encode())
    return file
