"""Bodies of requests: how large each may be, how much of them a tenant may send at once, and how slowly."""

import asyncio
from collections import Counter
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BODY_SECONDS = 60.0
_BODIES_AT_ONCE = 2  # of the largest
_JSON_MIB = 8  # what is parsed takes up to thirty times as much
_PROTOBUF_ROUTE = "/api/v1/forward_backward"


class TooLarge(HTTPException):
    """A body over the limit. FastAPI passes on an HTTPException that reading a body raises, and no other."""

    def __init__(self, limit: int):
        super().__init__(413, f"a body of over {limit >> 20} MiB; send less at once")


class TooSlow(HTTPException):
    """A body that does not come."""

    def __init__(self) -> None:
        super().__init__(408, f"the body did not come within {_BODY_SECONDS:.0f} s; send it again")


class TooMuch(HTTPException):
    """Bodies of one tenant that are being read."""

    def __init__(self, limit: int):
        super().__init__(429, f"you are sending over {limit >> 20} MiB at once; wait for answers in between")


class BodyLimits:
    """Within authentication: every request has its tenant. What is read of bodies is bounded by tenant."""

    def __init__(self, app: ASGIApp, max_body_mib: int, refuse: Callable[[Request, HTTPException], Response]):
        self._app = app
        self._largest = max_body_mib << 20
        self._largest_json = min(self._largest, _JSON_MIB << 20)
        self._refuse = refuse
        self._reading: Counter[str] = Counter()  # bytes by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        limit = self._largest if scope["path"] == _PROTOBUF_ROUTE else self._largest_json
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            return await self._refuse(request, TooLarge(limit))(scope, receive, send)
        body = _Body(
            receive, limit, request.state.tenant or "", self._reading, _BODIES_AT_ONCE * self._largest
        )
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.close()


class _Body:
    """Of one request. It counts what has come, for its tenant, until the request is answered."""

    def __init__(self, receive: Receive, limit: int, tenant: str, reading: Counter[str], most: int):
        self._receive = receive
        self._limit = limit
        self._tenant = tenant
        self._reading = reading
        self._most = most
        self._num_bytes = 0
        self._is_whole = False
        self._deadline = asyncio.get_running_loop().time() + _BODY_SECONDS

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()  # whether the client goes away
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow from None
        size = len(message.get("body", b""))
        self._num_bytes += size
        self._reading[self._tenant] += size
        self._is_whole = not message.get("more_body", False)
        if self._num_bytes > self._limit:
            raise TooLarge(self._limit)
        if self._reading[self._tenant] > self._most:
            raise TooMuch(self._most)
        return message

    def close(self) -> None:
        self._reading[self._tenant] -= self._num_bytes
        if not self._reading[self._tenant]:
            del self._reading[self._tenant]
