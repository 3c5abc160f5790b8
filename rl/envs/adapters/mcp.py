"""Tools of an MCP server (the mcp package, which vLLM installs)."""

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode, ServerLost
from rl.envs.chat.template import Schema
from rl.envs.chat.tools import BadArguments, Tool
from rl.envs.variables import clean_variables
from rl.errors import ConfigError, one_line
from rl.waiting import run_apart, within

_CONNECT_SECONDS = 30.0
_OF_THE_CLIENT = (
    (-32603, "Server returned an error response"),
    (-32601, "Not Found"),
    (-32600, "Session terminated"),
)
"""Errors that mcp 2.3's client makes of an HTTP status without an answer of the server.

As of a proxy's 502, or of the 404 of a server that was started again.
"""


@dataclass(frozen=True)
class MCPEnv(ChatEnv):
    """Derive from it as from ChatEnv. Each episode has a connection, or a server program, of its own."""

    server: tuple[str, ...] = ()
    """A URL, or a command and its arguments. A program gets the variables that programs need, no keys."""
    variables: tuple[str, ...] = ()
    """Names of variables that the program gets beside the ordinary ones, such as that of a key."""

    def tools(self) -> Sequence[Tool]:
        """The server's."""
        tools = run_apart(_listed(self._target()))
        return [Tool(schema, self._caller(schema["function"]["name"])) for schema in tools]

    def validate(self) -> list[str]:
        if not self.server:
            return ["env.server is empty; give an MCP server's URL, or its command"]
        if self.variables and self._is_remote:
            return ["env.variables has no effect on a server at a URL, which runs already; remove it"]
        return []

    @property
    def _is_remote(self) -> bool:
        return len(self.server) == 1 and self.server[0].startswith(("http://", "https://"))

    def _target(self) -> Any:
        if self._is_remote:
            return self.server[0]
        from mcp import StdioServerParameters, stdio_client

        program = StdioServerParameters(
            command=self.server[0], args=list(self.server[1:]), env=clean_variables(self.variables)
        )
        # Its default is what sys.stderr was when mcp was imported, which may be closed.
        return stdio_client(program, errlog=sys.__stderr__ or sys.stderr)

    def _caller(self, name: str) -> Callable[[Mapping[str, Any], Any], Any]:
        def call(arguments: Mapping[str, Any], episode: Episode) -> Awaitable[str]:
            if "mcp" not in episode.state:
                episode.state["mcp"] = _Connection(self._target(), is_own=not self._is_remote)
            return asyncio.wrap_future(episode.state["mcp"].call(name, arguments))

        async def run(arguments: Mapping[str, Any], episode: Episode) -> str:
            _check_json(arguments)
            return await call(arguments, episode)

        return run


async def _listed(target: Any) -> list[Schema]:
    from mcp import Client

    try:
        async with within(_CONNECT_SECONDS), Client(target) as client:
            tools = await list_tools(client)
    except Exception as error:  # whatever a server, or none, makes of the client
        raise ConfigError(
            f"the MCP server cannot be asked for its tools ({one_line(error)}); start it"
        ) from error
    return [schema_of(tool, tool.name) for tool in tools]


async def list_tools(client: Any) -> list[Any]:
    """The server's, of all pages of its list."""
    tools, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


def schema_of(tool: Any, name: str) -> Schema:
    """A server's tool as the policy is shown it."""
    described = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


async def call_tool(client: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """The result's text. Raises RuntimeError where the call came to nothing.

    Where the server is gone, it raises the client's own error.
    """
    import anyio
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    try:
        result = await client.call_tool(name, dict(arguments))
    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        raise
    except MCPError as error:
        if error.code == CONNECTION_CLOSED or (error.code, error.message) in _OF_THE_CLIENT:
            raise
        raise RuntimeError(error.message) from error
    except Exception as error:  # the client refuses a result that does not suit the tool's schema
        raise RuntimeError(str(error)) from error
    text = "\n".join(getattr(part, "text", str(part)) for part in result.content)
    if result.is_error:
        raise RuntimeError(text)
    return text


def _check_json(arguments: Mapping[str, Any]) -> None:
    """Raises BadArguments for what a server could not be sent."""
    try:
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # NaN, lone surrogates, thousands of lists in lists
        raise BadArguments(f"the arguments are no JSON ({one_line(error)})") from None


class _Connection:
    """A client in a thread of its own: it has to be opened and closed in one task.

    is_own: the server is the episode's own program. What ends it after its start is the policy's doing, which
    the policy is told. A server that did not start, or that others share, is the infrastructure's.
    """

    def __init__(self, target: Any, is_own: bool):
        self._target = target
        self._is_own = is_own
        self._end: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._calls: asyncio.Queue[tuple[str, Mapping[str, Any], Future[str]]] = asyncio.Queue()
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True).start()

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[str]:
        """One at a time. Gives the result's text."""
        answer: Future[str] = Future()
        if self._end is not None:
            answer.set_exception(self._end)
        else:
            self._loop.call_soon_threadsafe(self._calls.put_nowait, (name, arguments, answer))
        return answer

    async def _serve(self) -> None:
        from mcp import Client

        has_started = False
        name, arguments, answer = await self._calls.get()
        try:
            async with Client(self._target) as client:
                has_started = True
                while True:
                    try:
                        answer.set_result(await call_tool(client, name, arguments))
                    except RuntimeError as error:
                        answer.set_exception(error)
                    name, arguments, answer = await self._calls.get()
        except BaseException as error:  # the server is gone: the call that waits for it fails
            problem = f"the MCP server is gone ({one_line(error)})"
            self._end = RuntimeError(problem) if self._is_own and has_started else ServerLost(problem)
            if not answer.done():
                answer.set_exception(self._end)
