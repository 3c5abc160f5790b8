"""A run's directory in shared memory: owned by a lock, and gone when its owner is, however that ends."""

import fcntl
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/dev/shm")
_TEMPORARY = Path(tempfile.gettempdir())
_PREFIX = "rl-"


@contextmanager
def shared_directory(run_name: str, root: Path = ROOT) -> Iterator[Path]:
    """A new directory `rl-<pid>-<random>-<run_name>`.

    At the end it goes, with all whose name begins so, there and where temporary files are.

    What runs that were killed left behind is removed first. Another run's is never touched, also where it
    belongs to another container with the same shared memory: a lock, not a process number, says who lives.
    """
    remove_unowned(root)
    path = root / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}-{run_name[:64]}"
    lock = _make(path)
    # It removes the directory when this process is gone, which closes the pipe.
    script = 'cat >/dev/null; rm -rf -- "$1"* "$0"*'
    command = ["sh", "-c", script, str(path), str(_TEMPORARY / path.name)]
    janitor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield path
    finally:
        remove_shared(path)
        janitor.kill()
        janitor.wait()
        if janitor.stdin is not None:
            janitor.stdin.close()
        os.close(lock)


def remove_unowned(root: Path = ROOT) -> None:
    """Remove every run's directory in `root` whose owner is gone."""
    for path in root.glob(f"{_PREFIX}*-*"):
        with suppress(OSError):  # another user's, or gone in the meantime
            if path.is_dir():
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_shared(path)
                finally:
                    os.close(lock)


def remove_shared(path: Path) -> None:
    """The directory, and what else has a name that begins so, beside it and among temporary files."""
    there = [found for folder in (path.parent, _TEMPORARY) for found in folder.iterdir()]
    for found in [found for found in there if found.name.startswith(path.name)]:
        if found.is_dir():
            shutil.rmtree(found, ignore_errors=True)
        else:
            with suppress(OSError):
                found.unlink()


def _make(path: Path) -> int:
    """Make the directory. Returns its lock, which lasts as long as the file descriptor."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(path, os.O_RDONLY)
        # Another run may take it for an unowned one before it is locked, and remove it.
        with suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == path.stat().st_ino:
                return lock
        os.close(lock)
