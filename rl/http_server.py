"""Server: uvicorn within an event loop of ours."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from rl.host_protocol import written

KEPT_SECONDS = 600
"""How long a connection that is idle stays open: a request that comes as it is closed fails."""

_GONE = 499  # the client's status, which nobody reads


def url_of(listener: socket.socket) -> str:
    return f"http://{written(*listener.getsockname()[:2])}"


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The work's answer; it ends where the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else Response(status_code=_GONE)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.wait((working, watching))


class Server(uvicorn.Server):
    """Signals are the business of whoever runs it: there are processes to end."""

    @classmethod
    def of(cls, app: Starlette) -> "Server":
        """Of an app that only this run's processes ask."""
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=KEPT_SECONDS)
        return cls(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True

    def stop_now(self) -> None:
        """Requests under way are cut off."""
        self.should_exit = self.force_exit = True
