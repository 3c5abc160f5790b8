"""Server: uvicorn within an event loop of ours."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn


def listen(address: str) -> socket.socket:
    """On a free port of this address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=2048)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """Signals are the business of whoever runs it: there are processes to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
