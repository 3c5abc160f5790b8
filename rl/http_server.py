"""Server: uvicorn within an event loop of ours."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from rl.host_protocol import written

KEPT_SECONDS = 600
"""How long a connection that is idle stays open: a request that comes as it is closed fails."""


def url_of(listener: socket.socket) -> str:
    return f"http://{written(*listener.getsockname()[:2])}"


class Server(uvicorn.Server):
    """Signals are the business of whoever runs it: there are processes to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
