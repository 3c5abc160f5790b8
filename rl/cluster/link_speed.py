"""How fast bytes come from another host's worker: of `rl doctor --hosts` and the Plan."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from rl.host_protocol import (
    HostUnreachable,
    ask,
    greeting,
    line,
    listen,
    read_line,
    request_of,
    unreachable,
    written,
)

_CONNECT_SECONDS = 10.0
_CHUNK = 2**20
_MOST_NOISE = 2**30


async def send_noise(count: int, writer: asyncio.StreamWriter) -> None:
    """So many bytes, at most a GiB."""
    left = min(count, _MOST_NOISE)
    writer.write(line({"size": left}))
    while left > 0:
        writer.write(bytes(min(left, _CHUNK)))
        left -= _CHUNK
        await writer.drain()


@contextmanager
def noise_here(address: str) -> Iterator[str]:
    """A port of this process, of which other hosts' workers can measure a little. Without TLS."""
    listener = listen(address)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # it is over
                return
            with connection, suppress(OSError, ValueError, KeyError):
                connection.settimeout(_CONNECT_SECONDS)
                nonce, first = greeting()
                connection.sendall(first)
                size = min(int(request_of(read_line(connection), nonce)["count"]), _CHUNK)
                connection.sendall(line({"size": size}) + bytes(size))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield written(address, listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # else `accept` waits for another
        listener.close()
        thread.join()


def measure(address: str, count: int, streams: int) -> dict[str, Any]:
    """Seconds in which so many bytes come from another host's worker, over so many connections."""
    try:
        with ThreadPoolExecutor(streams) as threads, ExitStack() as opened:
            asked = {"do": "noise", "count": count // streams}
            connections = [ask(address, asked, _CONNECT_SECONDS)[1] for _ in range(streams)]
            for connection in connections:
                opened.enter_context(connection)
            began = time.perf_counter()
            sizes = [*threads.map(partial(_drain, count=count // streams), connections)]
        return {"seconds": time.perf_counter() - began, "size": sum(sizes)}
    except HostUnreachable as error:
        return {"unreachable": str(error)}
    except OSError as error:
        return {"unreachable": unreachable(address, error)}


def _drain(connection: socket.socket, count: int) -> int:
    received, buffer = 0, bytearray(_CHUNK)
    while received < count:
        if not (size := connection.recv_into(buffer)):
            raise ConnectionError("it closed the connection")
        received += size
    return received
