"""NeMo Gym's resources servers (nemo-gym 0.7), over HTTP: beside the server, nothing to install."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx

from rl.bounds import FilePath, PositiveInt
from rl.envs.adapters.sessions import broken_session
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode, ServerLost
from rl.envs.chat.tools import BadArguments, Tool
from rl.envs.problems import digest_of
from rl.errors import one_line
from rl.types import Message, Problem, StopReason

_CONNECT_SECONDS = 10.0
_PARAMS = "responses_create_params"
_ONE_CALL = "only a turn's first call is run here (parallel_tool_calls is false)"


@dataclass(frozen=True)
class NeMoGym(ChatEnv):
    """The rows say what is asked and which tools there are; the server runs them, and verifies.

    An episode is a session of the server, by its cookies.
    """

    url: str = ""
    """Of the resources server, such as http://localhost:8000."""
    path: FilePath = ""
    """A file of rows, one JSON object a line, each with responses_create_params."""
    num_eval: PositiveInt = 64

    def generate(self, seed: int) -> Problem:
        rows = _rows(self.path)
        index = seed % len(rows)
        messages = tuple(_messages(rows[index][_PARAMS]))
        metadata = {"row": digest_of(rows[index])}
        return Problem(str(index), str(messages[-1]["content"]), metadata=metadata, messages=messages)

    def tools(self) -> Sequence[Tool]:
        """The server's: those of the rows."""
        return [Tool(_schema(tool), self._calling(tool["name"])) for tool in _tools(_rows(self.path)[0])]

    def start(self, episode: Episode) -> None:
        # What the policy wrote may be slow to run: how long an answer may take is the episode's to say.
        patience = httpx.Timeout(None, connect=_CONNECT_SECONDS)
        session = episode.state["session"] = httpx.Client(base_url=self.url, timeout=patience)
        began = _post(session, "seed_session", _rows(self.path)[int(episode.problem.id)])
        began.raise_for_status()
        if began.json().get("mcp"):
            raise ValueError("this server's tools are MCP's, which are not offered here; use direct ones")

    def reward_episode(self, episode: Episode) -> float:
        """What /verify says."""
        row = _rows(self.path)[int(episode.problem.id)]
        answered = {"response": _response(episode, row[_PARAMS])}
        verified = _post(episode.state["session"], "verify", {**row, **answered})
        verified.raise_for_status()
        verdict = verified.json()
        if verdict.get("mask_sample"):
            reason = " ".join(f"{verdict.get('failure_kind')}: {verdict.get('failure_reason')}".split())
            raise ServerLost(f"the NeMo Gym server could not score the episode ({reason})")
        episode.notes["verified"] = {k: v for k, v in verdict.items() if k not in (*row, "response")}
        return float(verdict["reward"])

    def _calling(self, name: str) -> Callable[[Mapping[str, Any], Episode], str]:
        def call(arguments: Mapping[str, Any], episode: Episode) -> str:
            params = _rows(self.path)[int(episode.problem.id)][_PARAMS]
            # Results of this turn are no messages yet.
            before = sum(message["role"] == "tool" for message in episode.messages[episode.num_opening :])
            if len(episode.tool_results) > before and params.get("parallel_tool_calls") is False:
                raise BadArguments(_ONE_CALL)
            return _post(episode.state["session"], name, arguments).text  # an error's too

        return call

    def validate(self) -> list[str]:
        if not self.url.startswith(("http://", "https://")):
            return [f"env.url={self.url!r} is no server; give one, such as http://localhost:8000"]
        try:
            rows = _rows(self.path)
            tools = {json.dumps(_tools(row), sort_keys=True) for row in rows}
            asked = [_messages(row[_PARAMS]) and row[_PARAMS]["input"] for row in rows]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return [
                f"env.path={self.path!r} cannot be read ({one_line(error)}); give rows of messages of text"
            ]
        if len(rows) <= self.num_eval:
            return [f"env.path has {len(rows)} rows; lower env.num_eval={self.num_eval}"]
        if len(tools) > 1:
            return [f"the rows of env.path have {len(tools)} sets of tools; give a file for each"]
        return (
            [] if all(asked) else ["a row of env.path asks nothing: responses_create_params.input is empty"]
        )


@lru_cache(maxsize=4)
def _rows(path: str) -> Sequence[dict[str, Any]]:
    lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")  # not at U+2028 in a text
    return [json.loads(line) for line in lines if line.strip()]


def _tools(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [tool for tool in row[_PARAMS].get("tools") or () if tool.get("type") == "function"]


def _messages(params: Mapping[str, Any]) -> list[Message]:
    """Of a Responses request, as chat messages. Its instructions and what the system says first are one."""
    asked, instructions = params["input"], params.get("instructions")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    messages = [_chat_message(item) for item in items]
    if not instructions:
        return messages
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    text = "\n\n".join([instructions, *(message["content"] for message in leading)])
    return [{"role": "system", "content": text}, *messages[len(leading) :]]


def _chat_message(item: Mapping[str, Any]) -> Message:
    if "role" not in item:
        raise ValueError(f"an input of type {item.get('type')!r} is not offered here")
    content = item["content"]
    if not isinstance(content, str) and (others := [part for part in content if "text" not in part]):
        raise ValueError(f"content of type {others[0].get('type')!r} is not offered here")
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {"role": "system" if item["role"] == "developer" else item["role"], "content": text}


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool.get(name) or "" for name in ("name", "description")}
    return {"type": "function", "function": {**function, "parameters": tool.get("parameters") or {}}}


def _post(session: httpx.Client, path: str, body: Mapping[str, Any]) -> httpx.Response:
    try:
        return session.post(f"/{path}", json=dict(body))
    except httpx.TransportError as error:
        raise broken_session("NeMo Gym", str(session.base_url), error) from error


def _response(episode: Episode, params: Mapping[str, Any]) -> dict[str, Any]:
    """The episode as OpenAI's Responses API has it."""
    is_cut = episode.stop == StopReason.LENGTH and episode.messages[-1]["role"] == "assistant"
    return {
        "id": f"resp_{episode.problem.id}",
        "created_at": time.time(),
        "model": "policy",
        "object": "response",
        "output": list(_items(episode.messages[episode.num_opening :])),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": params.get("instructions"),
        "parallel_tool_calls": params.get("parallel_tool_calls", True),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
    }


def _turn_items(number: int, message: Message) -> Iterator[dict[str, Any]]:
    """A turn is never nothing: one without words, thoughts and calls is a message with an empty text."""
    thoughts, calls = message.get("reasoning_content"), message.get("tool_calls") or ()
    if thoughts:
        summary = [{"type": "summary_text", "text": thoughts}]
        yield {"id": f"rs_{number}", "type": "reasoning", "summary": summary, "status": "completed"}
    if message["content"] or not (thoughts or calls):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed"}
        yield {**item, "content": [text]}
    for call in calls:
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _items(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    not_run = {
        message["tool_call_id"]
        for message in messages
        if message["role"] == "tool" and message["content"] == f"Error: {_ONE_CALL}"
    }
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            calls = [call for call in message.get("tool_calls") or () if call["id"] not in not_run]
            yield from _turn_items(number, {**message, "tool_calls": calls})
        if message["role"] == "tool" and message["tool_call_id"] not in not_run:
            item = {"type": "function_call_output", "call_id": message["tool_call_id"]}
            yield {**item, "output": message["content"]}
