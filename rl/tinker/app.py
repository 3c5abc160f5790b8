"""The HTTP server: whose request it is, how large it may be, and what failures look like. See `routes`."""

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any

import zstandard
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from rl.errors import RunError
from rl.models.tokenizer import HFTokenizer
from rl.openai_format import refusal
from rl.tinker.backend import ContextExceeded, NotFound, UserError
from rl.tinker.bodies import BodyLimits, TooLarge
from rl.tinker.connection import Unavailable
from rl.tinker.downloads import PREFIX
from rl.tinker.keys import Keys
from rl.tinker.openai import add_openai_routes
from rl.tinker.requests import TooMany
from rl.tinker.routes import Served, add_routes
from rl.tinker.service import Service

_OPEN = "/api/v1/healthz"  # without a key, as are downloads, whose URLs are signed
_MAX_FIELD = 1000
_REST_SECONDS = 1.0  # while the database is away


def make_app(
    service: Service,
    keys: Keys | None,
    served: Served,
    max_body_mib: int = 64,
    tokenizer: HFTokenizer | None = None,
) -> FastAPI:
    """keys: None: whoever asks is the same tenant. tokenizer: for OpenAI's endpoints."""
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
        problems = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
        return _error(request, 422, "; ".join(problems)[:_MAX_FIELD])

    async def unavailable(request: Request, error: Exception) -> Response:
        """Clients ask again at once."""
        await asyncio.sleep(_REST_SECONDS)
        return _error(request, 503, str(error)[:_MAX_FIELD])

    app.add_exception_handler(Unavailable, unavailable)
    app.add_exception_handler(UserError, refuse(422))
    app.add_exception_handler(ContextExceeded, refuse(400))
    app.add_exception_handler(NotFound, refuse(404))
    app.add_exception_handler(TooMany, refuse(429))
    app.add_exception_handler(RunError, refuse(500))
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_middleware(
        BodyLimits, max_body_mib=max_body_mib, refuse=lambda r, e: _error(r, e.status_code, e.detail)
    )
    app.add_middleware(_Authentication, keys=keys)  # the outer one: bodies belong to a tenant
    add_routes(app, service, served, read_body)
    if tokenizer is not None:
        add_openai_routes(app, service, tokenizer)
    return app


class _Authentication:
    """Puts the tenant into the request's state, or answers 401."""

    def __init__(self, app: ASGIApp, keys: Keys | None):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = Request(scope)
        tenant = self._keys.tenant_of(_key_of(request)) if self._keys else "local"
        answer = self._app
        if tenant is None and scope["path"] != _OPEN and not scope["path"].startswith(PREFIX):
            wanted = {"WWW-Authenticate": 'Basic realm="rl serve: the API key as password"'}
            answer = _error(request, 401, "the API key is missing or wrong; set TINKER_API_KEY", wanted)
        request.state.tenant = tenant
        await answer(scope, receive, send)


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
