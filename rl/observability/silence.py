"""Lines while something takes long before a run's Recorder is there."""

import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_SECONDS = 10.0


@contextmanager
def break_silence(activity: str) -> Iterator[None]:
    """A line every ten seconds, with what is under way, until the body ends.

    On standard error as it is now: the body may redirect it, and standard output may be what a program reads,
    as that of `rl plan --json`. The thread that writes ends with the body.
    """
    out, ended = _copy(sys.stderr), threading.Event()

    def tell() -> None:
        began = time.monotonic()
        with suppress(OSError):  # nobody reads
            while not ended.wait(_SECONDS):
                print(f"{time.monotonic() - began:.0f} s: {activity}", file=out, flush=True)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if out is not sys.stderr:
            with suppress(OSError):
                out.close()


def _copy(stream: TextIO) -> TextIO:
    """Writes where the stream writes now; the stream itself where that is no file."""
    try:
        stream.flush()
        return os.fdopen(os.dup(stream.fileno()), "w", buffering=1)
    except (OSError, ValueError, io.UnsupportedOperation):
        return stream
