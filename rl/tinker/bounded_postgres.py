"""A connection to PostgreSQL whose statements end, also where the server is there and does not answer.

The server's own `statement_timeout` does not hold where the server itself is stopped: its machine's kernel
goes on to acknowledge what is sent to it.
"""

import time
from collections.abc import Generator
from typing import Any

import psycopg


class BoundedConnection(psycopg.Connection[Any]):
    """Closes itself where a statement has no answer after `answer_seconds`; None: waits for ever."""

    answer_seconds: float | None = None

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """psycopg has it called for whatever waits for the server, and look up ten times a second."""
        seconds = self.answer_seconds
        return super().wait(gen if seconds is None else self._bounded(gen, seconds), *args, **kwargs)

    def _bounded(self, gen: Any, seconds: float) -> Generator[Any, Any, Any]:
        until = time.monotonic() + seconds
        try:
            waited_for = next(gen)
            while True:
                ready = yield waited_for
                if not ready and time.monotonic() > until:
                    self.close()
                    raise psycopg.OperationalError(f"the server has not answered for {seconds:g} s")
                waited_for = gen.send(ready)
        except StopIteration as end:
            return end.value
