"""What an environment's code raised, as the failure of its episode or reward."""

import traceback
from pathlib import Path

from rl.errors import BadReturn, EpisodeFailed, Unavailable, message_of, one_line


def failure_of(error: Exception) -> EpisodeFailed:
    """With its cause (rl/causes.py)."""
    if isinstance(error, BadReturn | Unavailable):
        return EpisodeFailed(message_of(error), error.cause)
    if isinstance(error, MemoryError):
        return EpisodeFailed("out of memory; raise env.max_memory_gib", "memory")
    return EpisodeFailed(described(error), "raised")


def described(error: Exception) -> str:
    """An error on one line, with its place."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({Path(where.filename).name} line {where.lineno})"
