"""Server: uvicorn within an event loop of ours."""

import contextlib
from collections.abc import Iterator

import uvicorn


class Server(uvicorn.Server):
    """Signals are the business of whoever runs it: there are processes to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
