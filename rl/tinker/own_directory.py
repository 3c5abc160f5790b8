"""The server's directory: for one server at a time, and for its user alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.errors import ConfigError
from rl.paths import LOCK, lock_directory

_OTHERS = 0o077


@contextmanager
def own_directory(directory: Path) -> Iterator[None]:
    """Within the context the directory is this server's, and only its user may enter it.

    Whatever this process and its children write meanwhile is for this user alone too: they have its umask.
    Raises ConfigError where the directory cannot be used.
    """
    umask = os.umask(_OTHERS)
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _keep_others_out(directory)
            lock = lock_directory(directory, "server")
        except OSError as error:
            raise ConfigError(f"the directory {directory} cannot be used ({error}); give another") from error
        try:
            yield
        finally:
            os.close(lock)
    finally:
        os.umask(umask)


def _keep_others_out(directory: Path) -> None:
    """A server's own directory, which an older version made for all to read, is narrowed.

    Any other may be meant for others: ConfigError.
    """
    mode = directory.stat().st_mode & 0o777
    if not mode & _OTHERS:
        return
    if any(directory.iterdir()) and not (directory / LOCK).exists():
        raise ConfigError(
            f"others may enter {directory} (mode {mode:o}), which is no server's yet and not empty; give a "
            f"server a directory of its own, or run chmod 700 {directory}"
        )
    directory.chmod(0o700)
