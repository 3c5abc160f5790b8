"""What an environment's code raised, as the failure of its episode or reward."""

import traceback
from pathlib import Path

from rl.errors import BadReturn, EpisodeFailed, Unavailable, message_of, one_line


def failure_of(error: Exception, more_memory: str) -> EpisodeFailed:
    """With its cause (rl/causes.py). more_memory: what to do where the memory was too little."""
    if (known := known_in(error)) is not None:
        return EpisodeFailed(message_of(known), known.cause)
    if isinstance(error, MemoryError):
        return EpisodeFailed(f"out of memory; {more_memory}", "memory")
    return EpisodeFailed(described(error), "raised")


def known_in(error: BaseException) -> BadReturn | Unavailable | None:
    """The error itself, or the first of a group, as of tasks, that consists of such."""
    if isinstance(error, BaseExceptionGroup):
        parts = [known_in(part) for part in error.exceptions]
        return parts[0] if all(parts) else None
    return error if isinstance(error, BadReturn | Unavailable) else None


def described(error: Exception) -> str:
    """An error on one line, with its place."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} ({Path(where.filename).name} line {where.lineno})"
