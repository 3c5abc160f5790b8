"""What a problem has to be, so that it can be asked, sent to other processes, and known again."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rl.envs.chat.messages import wrong_with
from rl.errors import ConfigError
from rl.fields import kind, shown
from rl.types import Problem


def checked(problem: object) -> Problem:
    """What generate() made. Raises ConfigError where it is not a problem that can be asked."""
    if inspect.iscoroutine(problem):
        problem.close()  # or Python warns that nobody awaited it
    if not isinstance(problem, Problem):
        raise ConfigError(f"generate() returned {kind(problem)}; return a Problem(id, question, answer)")
    for name in ("id", "question", "answer", "task"):
        if not isinstance(value := getattr(problem, name), str):
            raise ConfigError(f"generate() made a Problem whose {name} is {kind(value)}; make it a string")
    if not problem.question.strip() and not problem.messages:
        raise ConfigError(f"generate() made the problem {problem.id!r} with an empty question; ask something")
    if why := _why_not_sent(problem):
        raise ConfigError(f"generate() made the problem {problem.id!r:.60} with {why}")
    return problem


def _why_not_sent(problem: Problem) -> str:
    """What keeps its messages or metadata from models, other processes or a fixed key; empty if nothing."""
    for message in problem.messages:
        if wrong := wrong_with(message):
            return f"the message {shown(message)}: {wrong}"
    if not isinstance(problem.metadata, Mapping):
        return f"metadata that are {kind(problem.metadata)}; make them a dictionary"
    parts = [problem.id, problem.question, problem.answer, problem.task, problem.messages, problem.metadata]
    for value in _leaves(parts):
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            return "half of a character (a lone surrogate, \\ud800 to \\udfff); leave it out"
        if isinstance(value, set | frozenset):
            return f"{kind(value)}, whose order differs between processes; use a sorted list"
        if type(value).__repr__ is object.__repr__:
            return f"{kind(value)}, which is another one in each process; use strings, numbers and lists"
    return ""


def _leaves(value: object) -> Iterator[object]:
    """All that lists, tuples and dictionaries hold, keys included."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def digest_of(row: Any) -> str:
    """What tells a row of a dataset from others that are asked in the same words: metadata."""
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=repr).encode()).hexdigest()[:16]
