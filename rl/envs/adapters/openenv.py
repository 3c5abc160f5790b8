"""OpenEnv's environment servers (openenv 0.10), over WebSocket: beside the server, nothing to install."""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect

from rl.bounds import PositiveInt
from rl.envs.adapters.sessions import broken_session
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode, ServerLost
from rl.envs.chat.tools import Tool
from rl.errors import ConfigError, one_line
from rl.types import Message, Problem, Rewards

_CONNECT_SECONDS = 10.0
_MAX_BYTES = 100 * 2**20  # of a message, as OpenEnv's own client has it


@dataclass(frozen=True)
class OpenEnv(ChatEnv):
    """Each episode is a session of the server, which has to allow that many (max_concurrent_envs).

    Its rewards are those of the policy's turns: see `turn_rewards`.
    """

    url: str = ""
    """Of the server, such as http://localhost:8000."""
    action: str = ""
    """The field of its action that a turn's text becomes; empty: the policy calls the server's tools."""
    observation: str = ""
    """The field of its observation that the policy reads; empty: the whole of it, as JSON."""
    question: str = ""
    """The user's first words, before what reset() of the server says."""
    reset: tuple[tuple[str, Any], ...] = ()
    """What its reset() takes beside the seed."""
    turn_rewards: bool = False
    """Its rewards turn by turn, for advantages that read them (GAE, ReinforcePP); else their sum."""
    num_eval: PositiveInt = 64

    def generate(self, seed: int) -> Problem:
        return Problem(str(seed), f"{self.question or self.url} {seed}")

    def opening(self, problem: Problem) -> list[Message]:
        """The system's message alone."""
        return [{"role": "system", "content": self.prompt_prefix}] if self.prompt_prefix else []

    def tools(self) -> Sequence[Tool]:
        """The server's, where its actions are calls of them."""
        if self.action:
            return ()
        try:
            with contextlib.closing(_Session(self.url)) as session:
                session.ask("reset", dict(self.reset), _CONNECT_SECONDS)
                answer = session.ask("step", {"type": "list_tools"}, _CONNECT_SECONDS)
            listed = answer["observation"]["tools"]
        except (ServerLost, RuntimeError, LookupError) as error:
            raise ConfigError(
                f"the OpenEnv server {self.url} offers no tools ({one_line(error)}); set env.action to the "
                f"field of its action that is text (GET {self.url}/schema has them)"
            ) from error
        return [Tool(_schema(described), _calling(described["name"])) for described in listed]

    def start(self, episode: Episode) -> str:
        session = episode.state["session"] = _Session(self.url)
        episode.state["rewards"] = {}
        seed = int(episode.problem.id) % 2**32
        observation = self._said(session.ask("reset", {"seed": seed, **dict(self.reset)}))
        words = "\n\n".join(filter(None, [self.question, observation]))
        if not words:
            raise ValueError("reset() of the server says nothing; set env.question")
        return words

    def step(self, episode: Episode) -> str | None:
        if not self.action:
            return None
        observed = _act(episode, {self.action: episode.response})
        return None if episode.done else self._said(observed)

    def reward_episode(self, episode: Episode) -> float | Rewards:
        rewards = episode.state["rewards"]
        if not self.turn_rewards:
            return float(sum(rewards.values()))
        return Rewards(turns=tuple(rewards.get(i, 0.0) for i in range(len(episode.turn_tokens))))

    def validate(self) -> list[str]:
        if not self.url.startswith(("http://", "https://")):
            return [f"env.url={self.url!r} is no server; give one, such as http://localhost:8000"]
        return []

    def _said(self, observed: Mapping[str, Any]) -> str:
        seen = observed["observation"]
        if self.observation:
            return str(seen[self.observation])
        fields = {name: value for name, value in seen.items() if name != "metadata"}
        return json.dumps(fields) if fields else ""


class _Session:
    """One WebSocket, and with it one environment of the server."""

    def __init__(self, url: str):
        self._url = url
        address = url.replace("http", "ws", 1).rstrip("/") + "/ws"
        try:
            self._socket = connect(address, open_timeout=_CONNECT_SECONDS, max_size=_MAX_BYTES)
        except (OSError, WebSocketException) as error:
            raise ServerLost(f"the OpenEnv server {url} does not answer ({one_line(error)})") from error

    def ask(self, kind: str, data: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Raises RuntimeError with the server's words where it refuses, or where it ended this session alone,
        ServerLost where it is gone, or silent for so long. None: an episode's own deadline ends the wait."""
        try:
            with suppress(ConnectionClosed):  # by a server that is full: it says so, and closes
                self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(seconds))
        except ConnectionClosed as error:
            raise broken_session("OpenEnv", self._url, error) from error
        except (OSError, WebSocketException) as error:  # TimeoutError is one
            raise ServerLost(f"the OpenEnv server {self._url} is gone ({one_line(error)})") from error
        if answer["type"] != "error":
            return answer["data"]
        if answer["data"].get("code") == "CAPACITY_REACHED":
            raise ServerLost(
                f"the OpenEnv server {self._url} has no session left; start it with a max_concurrent_envs "
                f"of at least env.max_episodes"
            )
        raise RuntimeError(answer["data"].get("message", "the server refused"))

    def close(self) -> None:
        self._socket.close()


def _act(episode: Episode, action: Mapping[str, Any]) -> dict[str, Any]:
    """A step of the server's; its reward is the present turn's."""
    observed = episode.state["session"].ask("step", action)
    rewards, turn = episode.state["rewards"], len(episode.answers) - 1
    rewards[turn] = rewards.get(turn, 0.0) + float(observed.get("reward") or 0.0)
    episode.done = episode.done or bool(observed.get("done"))
    return observed


def _schema(described: Mapping[str, Any]) -> dict[str, Any]:
    parameters = described.get("input_schema") or described.get("inputSchema") or {}
    function = {"name": described["name"], "description": described.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _calling(name: str) -> Callable[[Mapping[str, Any], Episode], Any]:
    def call(arguments: Mapping[str, Any], episode: Episode) -> Any:
        action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        seen = _act(episode, action)["observation"]
        if seen.get("error"):
            raise RuntimeError(seen["error"].get("message", "the tool failed"))
        result = seen.get("result")
        return result["data"] if isinstance(result, dict) and "data" in result else result

    return call
