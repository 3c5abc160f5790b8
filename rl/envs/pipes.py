"""Length-prefixed pickles over pipes and sockets, for the processes that run an environment's code."""

import os
import pickle
import select
import struct
import time
from typing import Any

HEADER = struct.Struct("<Q")


def framed(data: bytes) -> bytes:
    """As it goes over the pipe: its length before it."""
    return HEADER.pack(len(data)) + data


def send(fd: int, message: object) -> None:
    """Any object that can be pickled. Raises what pickle does before a byte is written."""
    send_pickled(fd, pickle.dumps(message))


def send_pickled(fd: int, data: bytes) -> None:
    left = memoryview(framed(data))
    while left:
        left = left[os.write(fd, left) :]


def receive(fd: int, limit_seconds: float | None = None) -> Any:
    """One message. Raises TimeoutError past the limit, EOFError where the other end is gone."""
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
    ready = select.poll()  # select.select takes no descriptor past 1,023
    ready.register(fd, select.POLLIN)

    def exactly(count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            left = None if deadline is None else 1e3 * max(0.0, deadline - time.monotonic())
            if not ready.poll(left):
                raise TimeoutError
            chunk = os.read(fd, count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    return pickle.loads(exactly(HEADER.unpack(exactly(HEADER.size))[0]))
