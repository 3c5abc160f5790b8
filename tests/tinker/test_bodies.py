"""Bodies that are too large, too many or too slow, against the middleware itself, in made-up time."""

# holds: exact, counts of bytes

import asyncio

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from rl.tinker.bodies import BodyLimits
from tests.virtual_time import run_virtually

MIB = 1 << 20
PROTOBUF = "/api/v1/forward_backward"


class Server:
    """The middleware before a route that reads the whole body. `read` is how much it got."""

    def __init__(self, max_body_mib=4):
        self.read = []

        async def route(request):
            self.read.append(len(await request.body()))
            return JSONResponse({})

        async def http_error(request, error):
            return JSONResponse({"error": error.detail}, error.status_code)

        app = Starlette(
            routes=[Route("/{path:path}", route, methods=["POST"])],
            exception_handlers={code: http_error for code in (408, 413, 429)},
        )
        self.app = BodyLimits(
            app, max_body_mib, lambda request, error: JSONResponse({"error": error.detail}, error.status_code)
        )

    async def post(self, chunks, tenant="me", path=PROTOBUF, length=None):
        """chunks: (seconds before it comes, bytes). Returns the status."""
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        scope = {
            "type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"",
            "state": {"tenant": tenant},
        }  # fmt: skip
        waiting, answers = list(chunks), []

        async def receive():
            if not waiting:
                await asyncio.Event().wait()
            seconds, size = waiting.pop(0)
            await asyncio.sleep(seconds)
            return {"type": "http.request", "body": bytes(size), "more_body": bool(waiting)}

        async def send(message):
            answers.append(message)

        await self.app(scope, receive, send)
        return answers[0]["status"]


@pytest.mark.parametrize(
    ("path", "sizes", "length", "status"),
    [
        (PROTOBUF, [4 * MIB], None, 200),
        (PROTOBUF, [4 * MIB, 1], None, 413),
        (PROTOBUF, [0], 4 * MIB + 1, 413),
        ("/api/v1/asample", [4 * MIB], 4 * MIB, 200),
        ("/api/v1/asample", [4 * MIB + 1], None, 413),
    ],
)
def test_a_body_has_a_largest_size(path, sizes, length, status):
    server = Server()
    assert run_virtually(server.post([(0, size) for size in sizes], path=path, length=length)) == status
    assert server.read == ([sum(sizes)] if status == 200 else [])


def test_json_is_smaller_than_tensors():
    server = Server(64)
    assert run_virtually(server.post([(0, 9 * MIB)])) == 200
    assert run_virtually(server.post([(0, 9 * MIB)], path="/api/v1/asample")) == 413


def test_a_body_that_does_not_come_is_given_up():
    server = Server()
    assert run_virtually(server.post([(59, 1), (0, 1)])) == 200
    assert run_virtually(server.post([(30, 1), (31, 1)])) == 408
    assert server.app._reading == {}


def test_a_client_that_pipelines_holds_so_much_and_no_more():
    """Ten bodies at once, of which two fit; another tenant's fits too; then there is room again."""
    server = Server()

    async def main():
        mine = [server.post([(0, 4 * MIB - 1), (5, 1)]) for _ in range(10)]
        other = server.post([(1, 4 * MIB)], tenant="other")
        *mine, other = await asyncio.gather(*mine, other)
        assert sorted(mine) == [200] * 2 + [429] * 8 and other == 200
        assert await server.post([(0, 4 * MIB)]) == 200

    run_virtually(main())
    assert server.app._reading == {}
