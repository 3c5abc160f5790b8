"""Ranks that agree on a failure: none waits in a collective for another that has failed."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from rl.errors import RunError, one_line


def fail_together(failure: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank what any of them met, so that none waits for another. A collective."""
    failures: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, _sendable(failure), group=group)
    if first := next((f for f in failures if f is not None), None):
        raise failure or first


@contextmanager
def agreed(
    reason: Callable[[Exception], Exception] | None = None, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Whatever fails within it on any rank is raised on every rank at its end. A collective.

    For what some ranks do alone, as rank 0 that writes a file: no other waits for a rank that has failed.
    reason: the error to raise in the place of the one that was met.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
        if reason is not None:
            with suppress(Exception):  # it must not leave before the collective
                failure = reason(error)
        failure.__cause__ = error if failure is not error else error.__cause__
    fail_together(failure, group)


def not_written(out_dir: str | Path) -> Callable[[Exception], RunError]:
    """The reason for `agreed` of what writes into a directory."""
    return lambda error: RunError(
        f"{out_dir} could not be written: {one_line(error)}; make room, or give another directory"
    )


def _sendable(failure: Exception | None) -> Exception | None:
    """Its words, where the error itself does not survive pickling."""
    try:
        return pickle.loads(pickle.dumps(failure))
    except Exception:
        assert failure is not None
        return RunError(one_line(failure))
