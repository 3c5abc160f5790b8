"""Writer: a thread that writes, so that neither a disk nor a server holds up the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rl.errors import RunError, one_line

T = TypeVar("T")
_POLL_SECONDS = 1.0


class Late(Exception):
    """A writer did not get there in time."""


class Writer:
    """Runs jobs one after the other, in the order in which they came. Its methods never block.

    What waits is bounded by its size, in a unit of the owner's: `offer` takes as much as the bound, `put` as
    much again. A job's error is raised by the next `put`, `run` or `close`, once.
    """

    def __init__(self, name: str, max_size: int):
        """name: of what is written to, for errors."""
        self._name = name
        self._max_size = max_size
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()  # the first one is under way
        self._size = 0
        self._error: Exception | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        # A daemon, as it may hang in a call that never ends: the process must end all the same.
        threading.Thread(target=self._work, name=f"writer of {name}", daemon=True).start()

    def offer(self, job: Callable[[], object], size: int) -> bool:
        """Whether the job was taken: not where too much waits already."""
        with self._changed:
            if self._is_closed or (self._jobs and self._size + size > self._max_size):
                return False
            self._append(job, size)
            return True

    def put(self, job: Callable[[], object], size: int = 0) -> None:
        """A job that must not be dropped. Raises RunError where too much waits.

        An earlier job's error is raised once this one is taken: the disk may be well again.
        """
        with self._changed:
            if size and self._size + size > 2 * self._max_size:
                raise RunError(f"{self._name} does not keep up: {len(self._jobs)} writes wait for it")
            self._append(job, size)
        self._raise_error()

    async def run(self, job: Callable[[], T], seconds: float) -> T:
        """Waits for the job, and so for all that came before; returns what it returned.

        Raises Late where that takes longer than `seconds`. A job that nobody waits for any more is not begun.
        """
        done: Future[tuple[T | None, Exception | None]] = Future()

        def act() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result((job(), None))
            except BaseException as error:  # its caller's to handle
                done.set_result((None, _as_exception(error)))

        with self._changed:
            self._append(act, 0)
        await _wait(done, seconds)
        self._raise_error()
        result, error = done.result()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    async def close(self, job: Callable[[], object], seconds: float) -> int:
        """Do this last job, then take no more. Returns how many were not done in time: they are lost."""
        num_lost = 0
        try:
            await self.run(job, seconds)
        except Late:
            num_lost = len(self._jobs)
        finally:
            with self._changed:
                self._jobs.clear()
                self._is_closed = True
                self._changed.notify()
        return num_lost

    def _append(self, job: Callable[[], object], size: int) -> None:
        if self._is_closed:
            raise RunError(f"{self._name} is closed: nothing more can be written to it")
        self._jobs.append((job, size))
        self._size += size
        self._changed.notify()

    def _raise_error(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job, size = self._jobs[0]
            error: Exception | None = None
            try:
                job()
            except BaseException as raised:  # the thread goes on, whatever a job does
                error = _as_exception(raised)
            del job  # with all that it refers to
            with self._changed:
                self._error = self._error or error
                self._size -= size
                if self._jobs:  # else closed without it
                    self._jobs.popleft()


def _as_exception(error: BaseException) -> Exception:
    """SystemExit and KeyboardInterrupt of a job are not the main thread's."""
    return error if isinstance(error, Exception) else RunError(one_line(error))


async def _wait(done: Future, seconds: float) -> None:
    """By the clock, not by a timer of the loop: a job that is done is not late where the loop was blocked."""
    limit = time.monotonic() + seconds
    waiting = asyncio.wrap_future(done)
    try:
        while not done.done():
            left = limit - time.monotonic()
            if left <= 0:
                raise Late
            await asyncio.wait({waiting}, timeout=min(left, _POLL_SECONDS))
    finally:
        waiting.cancel()  # and the job with it; its loop may be closed when an answer comes
