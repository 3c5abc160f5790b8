"""Standard output that may be closed, or full, without ending what is under way."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Output:
    """A stream whose first failed write is its last. `failure` keeps it."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, do: Any) -> Any:
        if self.failure is not None:
            return None
        try:
            return do()
        except OSError as error:
            self.failure = error
            # What is still buffered goes nowhere, rather than fail again as the interpreter ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            return None


@contextmanager
def forgiving_output() -> Iterator[Output]:
    """It takes the place of standard output within the context."""
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # what another encoding than UTF-8 lacks
    sys.stdout = Output(stream or open(os.devnull, "w"))  # noqa: SIM115  # None: it was closed before Python
    try:
        yield sys.stdout
    finally:
        sys.stdout = stream
