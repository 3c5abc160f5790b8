"""The directory of an evaluation or a replay: nobody else's, and its logs stay there."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.errors import ConfigError, RunError
from rl.observability.log_tail import log_tail
from rl.paths import disk_failure, lock_directory, run_directory

_NAMES = {"eval": "model evaluation", "replay": "replay"}


@contextmanager
def own_directory(kind: str, run_dir: str = "") -> Iterator[Path]:
    """A directory that no other process writes into meanwhile.

    kind: eval or replay. run_dir: the setting; empty: a new one under runs/. Raises ConfigError where it
    cannot be made or belongs to another. A RunError of the context gets the place of its logs; a disk that
    fails in it is a RunError.
    """
    try:
        directory = run_directory(run_dir, kind)
        lock = lock_directory(directory, _NAMES[kind])
    except OSError as error:
        where = run_dir or "runs/"
        raise ConfigError(f"the directory {where} cannot be made ({error}); give another run_dir") from error
    try:
        yield directory
    except RunError as error:
        print(log_tail(directory, str(error)), file=sys.stderr, end="")
        raise RunError(f"{error}; its logs are in {directory / 'logs'}") from error
    except OSError as error:
        if not (failure := disk_failure(error, directory)):
            raise
        raise RunError(failure) from error
    finally:
        os.close(lock)
