"""Tools of an MCP server (the mcp package, which vLLM installs)."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode, ServerLost
from rl.envs.chat.template import Schema
from rl.envs.chat.tools import Tool
from rl.errors import ConfigError, one_line
from rl.waiting import within

_CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class MCPEnv(ChatEnv):
    """Derive from it as from ChatEnv. Each episode has a connection, or a server program, of its own."""

    server: tuple[str, ...] = ()
    """A URL, or a command and its arguments."""

    def tools(self) -> Sequence[Tool]:
        """The server's."""
        with ThreadPoolExecutor(1) as thread:  # whoever asks may have an event loop
            found = thread.submit(asyncio.run, _listed(self._target())).result()
        return [Tool(schema, self._caller(schema["function"]["name"])) for schema in found]

    def validate(self) -> list[str]:
        return [] if self.server else ["env.server is empty; give an MCP server's URL, or its command"]

    def _target(self) -> Any:
        if len(self.server) == 1 and self.server[0].startswith(("http://", "https://")):
            return self.server[0]
        from mcp import StdioServerParameters

        return StdioServerParameters(command=self.server[0], args=list(self.server[1:]))

    def _caller(self, name: str) -> Callable[[Mapping[str, Any], Any], Any]:
        def call(arguments: Mapping[str, Any], episode: Episode) -> Awaitable[Any]:
            if "mcp" not in episode.state:
                episode.state["mcp"] = _Connection(self._target())
            return asyncio.wrap_future(episode.state["mcp"].call(name, arguments))

        async def run(arguments: Mapping[str, Any], episode: Episode) -> str:
            return text_of(await call(arguments, episode))

        return run


async def _listed(target: Any) -> list[Schema]:
    from mcp import Client

    try:
        async with within(_CONNECT_SECONDS), Client(target) as client:
            listed = (await client.list_tools()).tools
    except Exception as error:  # whatever a server, or none, makes of the client
        raise ConfigError(
            f"the MCP server cannot be asked for its tools ({one_line(error)}); start it"
        ) from error
    return [schema_of(tool, tool.name) for tool in listed]


def schema_of(tool: Any, name: str) -> Schema:
    """A server's tool as the policy is shown it."""
    described = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


def text_of(result: Any) -> str:
    """Of what call_tool returned. Raises RuntimeError where that is an error."""
    said = "\n".join(getattr(part, "text", str(part)) for part in result.content)
    if result.is_error:
        raise RuntimeError(said)
    return said


class _Connection:
    """A client in a thread of its own: it has to be opened and closed in one task."""

    def __init__(self, target: Any):
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._calls: asyncio.Queue[tuple[str, Mapping[str, Any], Future[Any]]] = asyncio.Queue()
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True).start()

    def call(self, name: str, arguments: Mapping[str, Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._calls.put_nowait, (name, arguments, answer))
        return answer

    async def _serve(self) -> None:
        from mcp import Client

        name, arguments, answer = await self._calls.get()
        try:
            async with Client(self._target) as client:
                while True:
                    answer.set_result(await client.call_tool(name, dict(arguments)))
                    name, arguments, answer = await self._calls.get()
        except BaseException as error:  # a server that is gone: the call that waits for it fails
            if not answer.done():
                answer.set_exception(ServerLost(f"the MCP server is gone ({one_line(error)})"))
