"""Directories in shared memory and for temporary files: gone when their owner is, however it ends.

They lie in a root `rl-<uid>` that only this user may open. Each has a file `owner`, and the process that
holds its lock owns the directory: process numbers differ between containers that share memory. Nothing
outside the root is removed but what `note_beside` names. In the root two kinds of directories are removed:
those whose file `owner` is this user's and not locked, and empty ones.
"""

import atexit
import os
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from rl.errors import ConfigError
from rl.paths import lock

SHARED_MEMORY = Path("/dev/shm")
_OWNER, _BESIDE = "owner", "beside"
_MOST_ATTEMPTS = 100
_FIRST_LINE = "a directory of rl, removed by the next run once nobody locks this file"
# An address of a Unix socket has 107 bytes; the longest name under the directory is a UUID.
_LONGEST = 107 - len("/") - 36
# It removes its directory, and what is noted beside it, when the owner is gone, which closes the pipe. The
# owner's processes end at the same time, and may still write. What a scheduler sends to all of a job does not
# end it. The directory loses its name first, which the next owner may take: $2 is a line of its file `owner`.
# What has the name and no owner was made again by a process that still wrote.
_JANITOR = """
trap '' INT TERM HUP
while read -r line; do :; done
while read -r line; do [ "$line" = "$2" ] && is_it=1; done < "$0/owner" 2>/dev/null
[ "$is_it" ] || exit 0
gone="$0.gone-$$"
mv -- "$0" "$gone" 2>/dev/null || exit 0
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  for note in "$gone"/beside/*; do [ -e "$note" ] && rm -f -- "$1/${note##*/}"; done
  for path in "$gone"/* "$gone"/.[!.]*; do [ "$path" = "$gone/owner" ] || rm -rf -- "$path" 2>/dev/null; done
  rm -rf -- "$gone" 2>/dev/null
  [ -e "$0/owner" ] || rm -rf -- "$0" 2>/dev/null
  [ -e "$gone" ] || [ -e "$0" ] || break
  sleep 0.2
done
rmdir -- "${0%/*}" 2>/dev/null
"""


@contextmanager
def owned_directory(base: Path, label: str, name: str = "") -> Iterator[Path]:
    """A new directory `rl-<uid>/<name>` in `base`, removed at the end. Without a name, <pid>-<random>.

    Directories of runs that were killed are removed first. label: for people who find the directory. A fork
    of this process uses the directory and leaves it in place. Raises ConfigError where `base` cannot be used,
    or the root is another user's.
    """
    remove_unowned(base)
    maker = os.getpid()
    mark = uuid.uuid4().hex  # not its inode, which the next directory may have
    path, owner = _make(base, f"{label}\n{mark}", name)
    command = ["sh", "-c", _JANITOR, str(path), str(base), mark]
    janitor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield path
    finally:
        if os.getpid() == maker:
            _remove(path)
            _end(janitor)
            os.close(owner)


def _end(janitor: subprocess.Popen[bytes]) -> None:
    """Not by closing its pipe: forks of this process hold the pipe open for as long as they live."""
    janitor.kill()
    janitor.wait()
    assert janitor.stdin is not None
    janitor.stdin.close()


@lru_cache(maxsize=1)
def temporary_directory() -> Path:
    """For temporary files of this process and its children, until it ends.

    Monarch makes its sockets' directory there once in a process, so it cannot belong to one run of several.
    """
    kept = ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(owned_directory(temporary_base(), "temporary files"))


def temporary_base() -> Path:
    """TMPDIR, or, where it is too long for addresses of Unix sockets, /tmp or shared memory."""
    base = Path(tempfile.gettempdir())
    for candidate in (base, Path("/tmp"), SHARED_MEMORY):
        longest = _root(candidate) / "4194304-01234567"
        if len(os.fsencode(longest)) <= _LONGEST and os.access(candidate, os.W_OK | os.X_OK):
            return candidate
    return base


@contextmanager
def temporary_files() -> Iterator[None]:
    """TMPDIR of this process's libraries and of its children is the temporary directory."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(temporary_directory())
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def note_beside(directory: Path, name: str) -> None:
    """The file `name` beside the root, which nothing else is called, goes with the owned directory.

    For names that may have no directory in them, as those of POSIX shared memory. Called before it is made.
    """
    (directory / _BESIDE).mkdir(exist_ok=True)
    (directory / _BESIDE / name).touch()


def remove_unowned(base: Path) -> None:
    """Remove this user's directories in the root whose owner is gone, and empty ones without an owner.

    A process of a killed run may have made an empty one again where the run's temporary files were.
    """
    root = _root(base)
    if _is_foreign(root):
        return
    paths: list[Path] = []
    with suppress(OSError):  # there is no root, or another run removed the empty one in the meantime
        paths = list(root.iterdir())
    for path in paths:
        with suppress(OSError):  # it is not empty, or no directory
            path.rmdir()
        with suppress(OSError), _owner_file(path) as owner:  # gone in the meantime, or no directory of a run
            if _is_ours(path, owner) and lock(owner):
                _remove(path)


def _is_ours(path: Path, owner: int) -> bool:
    info = os.fstat(owner)
    if path.is_symlink() or info.st_uid != os.getuid() or not stat.S_ISREG(info.st_mode):
        return False
    return os.pread(owner, len(_FIRST_LINE), 0) == _FIRST_LINE.encode()


def _root(base: Path) -> Path:
    return base / f"rl-{os.getuid()}"


def _is_foreign(root: Path) -> bool:
    """Whether something else has the root's name: a link, a file, or what belongs to another user."""
    with suppress(FileNotFoundError):
        info = root.lstat()
        return info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode)
    return False


def _make(base: Path, label: str, name: str) -> tuple[Path, int]:
    """The directory, and the descriptor of its owner file, which holds the lock."""
    try:
        for _ in range(_MOST_ATTEMPTS if base.is_dir() else 0):
            with suppress(FileNotFoundError):  # another run removed the empty root in the meantime
                path = _made_root(base) / (name or f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
                path.mkdir(mode=0o700)
                if (owner := _own(path, label)) is not None:
                    return path, owner
    except OSError as error:
        raise ConfigError(
            f"no directory of this run can be made in {base} ({error.strerror}); make room there, or permit "
            f"it{_or_elsewhere(base)}"
        ) from error
    raise ConfigError(
        f"there is no directory {base} in which one can be made; mount a tmpfs there{_or_elsewhere(base)}"
    )


def _made_root(base: Path) -> Path:
    root = _root(base)
    if not os.path.lexists(root):
        root.mkdir(mode=0o700, exist_ok=True)
    if _is_foreign(root):
        raise ConfigError(
            f"{root} is no directory of this user (uid {os.getuid()}) and is left alone; remove it, or have "
            f"its owner remove it{_or_elsewhere(base)}"
        )
    root.chmod(0o700)
    return root


def _own(path: Path, label: str) -> int | None:
    """The descriptor of its new owner file, locked; None where another run took the directory for unowned."""
    try:
        owner = os.open(path / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(owner, f"{_FIRST_LINE}\npid {os.getpid()}\n{label}\n".encode(errors="replace"))
        if lock(owner) and (path / _OWNER).exists():
            return owner
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    os.close(owner)
    return None


def _or_elsewhere(base: Path) -> str:
    return "" if base == SHARED_MEMORY else ", or set TMPDIR to another directory"


def is_owned(path: Path) -> bool:
    """Whether it is a directory whose owner lives."""
    with suppress(OSError), _owner_file(path) as owner:
        return not lock(owner)
    return False


@contextmanager
def _owner_file(path: Path) -> Iterator[int]:
    """Its descriptor. Raises OSError."""
    owner = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield owner
    finally:
        os.close(owner)


def _remove(path: Path) -> None:
    """It loses its name first, and the file `owner` last: one that is removed by halves is removed later."""
    gone = path.with_name(f"{path.name}.gone-{uuid.uuid4().hex[:8]}")
    with suppress(OSError):  # the janitor or another run does it
        path.rename(gone)
        with suppress(FileNotFoundError):
            for note in (gone / _BESIDE).iterdir():
                (path.parent.parent / note.name).unlink(missing_ok=True)
        for child in gone.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != _OWNER:
                child.unlink(missing_ok=True)
        shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):  # other runs' directories are in it
        path.parent.rmdir()
