"""Files of published weights: their names, who holds one, and which are released."""

import fcntl
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from glob import escape
from pathlib import Path

RELEASED = ".released"
"""At the end of the name of a file that may take another version. Until then it has the bytes of its own."""
AT = "!"  # between a host and a path
_VERSION = re.compile(r"-v(\d+)(?=-rank\d+\.bin(\.released)?$)")


def version_of(path: Path) -> int:
    """Of the weights in a file of this name; -1 where it is not such a file's."""
    match = _VERSION.search(path.name)
    return int(match[1]) if match else -1


def pattern_of(path: str) -> str:
    """Matches the names of all versions of the file."""
    return _VERSION.sub("-v*", escape(Path(path).name))


def without_version(path: str) -> str:
    """What the paths of all versions have in common."""
    return _VERSION.sub("", path)


def names_of(path: str) -> tuple[str, str]:
    """Under which a version has its bytes: until it is released, and then until another takes the file."""
    return path, f"{path}{RELEASED}"


def hold(path: str | Path) -> int:
    """A descriptor of the file. Until it is closed, the file takes no other version.

    Raises FileNotFoundError where there is none of this name, or it just took another version.
    """
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(file), os.stat(path)):  # it was taken before it was locked
            raise FileNotFoundError(path)
    except BaseException:
        os.close(file)
        raise
    return file


def hold_released(path: str) -> int:
    """As `hold`; a file that is released will do. Raises FileNotFoundError."""
    published, released = names_of(path)
    with suppress(FileNotFoundError):
        return hold(published)
    return hold(released)


def release_files(released: Iterable[str]) -> None:
    """Release the files of these keys that are on this host. released: some of a manifest's keys."""
    for key in released:
        _, path = parts_of(key)
        with suppress(FileNotFoundError):
            os.rename(path, f"{path}{RELEASED}")


def release_version(directory: Path, version: Iterable[str]) -> None:
    """Release a version's files on this host. version: all of its manifest's keys.

    Released files of the same model go that are of ranks which this version does not have: nobody takes them
    any more.
    """
    version = list(version)
    release_files(version)
    of_ranks = {without_version(parts_of(key)[1]) for key in version}
    models = {_without_rank(path) for path in of_ranks}
    for file in directory.glob(f"*{RELEASED}"):
        of_rank = without_version(str(file)).removesuffix(RELEASED)
        if of_rank not in of_ranks and _without_rank(of_rank) in models:
            file.unlink(missing_ok=True)


def _without_rank(path: str) -> str:
    return re.sub(r"-rank\d+\.bin$", "", path)


def parts_of(key: str) -> tuple[str, str]:
    """The host that wrote it, empty where there is one alone, and the path."""
    host, _, path = key.rpartition(AT)
    return host, path
