"""The HTTP server: whose request it is, how large it may be, and what failures look like. See `routes`."""

import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import zstandard
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl.errors import RunError
from rl.models.tokenizer import HFTokenizer
from rl.openai_format import refusal
from rl.tinker.backend import NotFound, UserError
from rl.tinker.downloads import PREFIX
from rl.tinker.keys import tenant_of
from rl.tinker.openai import add_openai_routes
from rl.tinker.requests import TooMany
from rl.tinker.routes import Served, add_routes
from rl.tinker.service import Service

_OPEN = "/api/v1/healthz"  # without a key, as are downloads, whose URLs are signed
_MAX_FIELD = 1000


class TooLarge(HTTPException):
    """A body over the limit. FastAPI passes on an HTTPException that reading a body raises, and no other."""

    def __init__(self, limit: int):
        super().__init__(413, f"a body of over {limit >> 20} MiB; send less at once")


def make_app(
    service: Service,
    keys: Sequence[str],
    served: Served,
    max_body_mib: int = 64,
    tokenizer: HFTokenizer | None = None,
) -> FastAPI:
    """keys: the API keys; empty: whoever asks is the same tenant. tokenizer: for OpenAI's endpoints."""
    app = FastAPI(title="rl serve", docs_url=None, redoc_url=None, openapi_url=None)
    limit = max_body_mib << 20

    async def read_body(request: Request) -> bytes:
        """Decompressed. Raises TooLarge before there is more of it than may be."""
        body = await request.body()
        if request.headers.get("content-encoding") != "zstd":
            return body
        try:
            with zstandard.ZstdDecompressor().stream_reader(body) as reader:
                whole = reader.read(limit + 1)
        except zstandard.ZstdError as error:
            raise UserError(f"the body is not zstd: {error}") from error
        if len(whole) > limit:
            raise TooLarge(limit)
        return whole

    def refuse(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(request: Request, error: Exception) -> Response:
            return _error(request, status, str(error)[:_MAX_FIELD], code=getattr(error, "code", None))

        return answer

    async def of_http(request: Request, error: Exception) -> Response:
        """Too large, no such route, or no such method."""
        assert isinstance(error, HTTPException)
        return _error(request, error.status_code, error.detail, dict(error.headers or {}))

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        said = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
        return _error(request, 422, "; ".join(said)[:_MAX_FIELD])

    app.add_exception_handler(UserError, refuse(422))
    app.add_exception_handler(NotFound, refuse(404))
    app.add_exception_handler(TooMany, refuse(429))
    app.add_exception_handler(RunError, refuse(500))
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_middleware(_Authentication, keys=tuple(keys), limit=limit)
    add_routes(app, service, served, read_body)
    if tokenizer is not None:
        add_openai_routes(app, service, tokenizer)
    return app


class _Authentication:
    """Puts the tenant into the request's state, or answers 401; 413 for a body that is too large."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], limit: int):
        self._app = app
        self._keys = keys
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        tenant = tenant_of(_key_of(request), self._keys) if self._keys else "local"
        length = request.headers.get("content-length", "0")
        if tenant is None and scope["path"] != _OPEN and not scope["path"].startswith(PREFIX):
            wanted = {"WWW-Authenticate": 'Basic realm="rl serve: the API key as password"'}
            answer = _error(request, 401, "the API key is missing or wrong; set TINKER_API_KEY", wanted)
        elif length.isdecimal() and int(length) > self._limit:
            too_large = TooLarge(self._limit)
            answer = _error(request, too_large.status_code, too_large.detail)
        else:
            request.state.tenant = tenant
            answer = self._app
        await answer(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        """Of a body that comes in chunks nobody says how long it is."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                raise TooLarge(self._limit)
            return message

        return limited


def _key_of(request: Request) -> str:
    """Of the SDK, of OpenAI's clients, or of a browser."""
    if key := request.headers.get("x-api-key"):
        return key
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _error(
    request: Request,
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    code: str | None = None,
) -> Any:
    """As the client of the route reads it: OpenAI's, or Tinker's. code: OpenAI's, where there is one."""
    if request.url.path.startswith("/v1/"):
        status = 400 if status == 422 else status
        error: Any = refusal(status, message, code)
    else:
        error = {"error": message, "detail": message, "category": "server" if status >= 500 else "user"}
    return JSONResponse(error, status, headers=headers)
