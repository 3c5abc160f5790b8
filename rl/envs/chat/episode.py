"""Episode: one walk of the policy through a ChatEnv, as the environment's own code sees it.

EpisodeRunner runs that code, in a process of the episode's own.
"""

import asyncio
import inspect
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.envs.chat.messages import wrong_with
from rl.envs.chat.template import Schema
from rl.envs.chat.tools import BadArguments, Tool
from rl.envs.failures import known_in
from rl.envs.variables import reach_directly
from rl.errors import BadReturn, Unavailable, message_of, one_line
from rl.types import Message, Problem, Score, StopReason


@dataclass(frozen=True)
class ToolResult:
    """A call that the policy made, and what it was told."""

    name: str
    arguments: Mapping[str, Any]
    content: str
    failed: bool = False  # no such tool, arguments that do not suit it, or it raised


@dataclass
class Episode:
    """What tools, `step` and `reward_episode` read and change."""

    problem: Problem
    rng: random.Random
    """Seeded by the run, the prompt and the sample: what is drawn from it is drawn again on a resume."""
    messages: list[Message]
    """The whole conversation so far."""
    state: dict[str, Any] = field(default_factory=dict)
    """Yours: whatever tools and `step` remember."""
    tool_results: list[ToolResult] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    """Yours: what rollouts.jsonl should have of this episode, such as a judge's words."""
    done: bool = False
    """Set it in a tool to end the episode after this turn."""
    stop: StopReason = StopReason.STOP
    """LENGTH where a budget cut the episode off: tokens of a turn, turns, or tokens in all."""
    turn_tokens: list[Sequence[int]] = field(default_factory=list)
    """The tokens that were sampled in each turn; of an agent's, at the end."""
    answers: list[str] = field(default_factory=list)
    """The policy's turns as text, one for each of turn_tokens; one that only calls tools is empty."""
    turn_texts: list[str] = field(default_factory=list)
    """All that it wrote in each turn, reasoning and calls as they stand. Of an agent there is none."""
    num_opening: int = 0
    """How many of the messages stood there before the policy's first turn."""

    @property
    def response(self) -> str:
        """The policy's last turn."""
        return (self.answers or [""])[-1]


@dataclass(frozen=True, slots=True)
class Opening:
    """How an episode begins."""

    messages: Sequence[Message]
    tools: Sequence[Schema]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the environment says to a turn of the policy."""

    messages: Sequence[Message] = ()
    done: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    score: Score | None = None  # once it is done
    tool_results: Sequence[ToolResult] = ()


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """One of a problem's episodes, after its end: what an Episode has, but for its `state`."""

    messages: Sequence[Message]
    stop: StopReason
    turn_tokens: Sequence[Sequence[int]]
    answers: Sequence[str]
    turn_texts: Sequence[str]
    num_opening: int
    tool_results: Sequence[ToolResult]
    notes: Mapping[str, Any]


class ServerLost(Unavailable):
    """Raise it in a tool, step() or start() where a server that the episode needs is gone.

    The sample is dropped, with this as its reason; what else a tool raises is told to the policy.
    """


class EpisodeRunner:
    """For a process of the episode's own: whatever the environment does here may hang or crash."""

    def __init__(self, env: Any, tools: Sequence[Tool], problem: Problem, seed: int):
        """tools: what env.tools() gave."""
        self._env = env
        self._tools = {tool.name: tool for tool in tools}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.episode = Episode(problem, random.Random(seed), [])

    def begin(self) -> Opening:
        """The first messages."""
        env, episode = self._env, self.episode
        episode.messages += _messages(env.opening(episode.problem), "opening") or []
        episode.messages += _messages(self._run(env.start(episode)), "start") or []
        episode.num_opening = len(episode.messages)
        return Opening(list(episode.messages), [tool.schema for tool in self._tools.values()])

    def step(self, message: Message, malformed: Sequence[str], tokens: Sequence[int]) -> Reply:
        """After a turn of the policy: run its calls, or else ask the environment what comes next.

        malformed: what is wrong with calls that could not be read. The reply has no score.
        """
        self._hear([message])
        self.episode.turn_tokens.append(tokens)
        self.episode.answers.append(str(message["content"]))
        counts: Counter[str] = Counter()
        num_results = len(self.episode.tool_results)
        if malformed:
            counts["malformed_calls"] = len(malformed)
            new: list[Message] = [
                {"role": "user", "content": f"Error: {malformed[0]}. Write the call again."}
            ]
        elif calls := message.get("tool_calls"):
            new = [self._call(call, counts) for call in calls]
        else:
            reply = _messages(self._run(self._env.step(self.episode)), "step")
            if reply is None:
                return Reply(done=True)
            new = reply
        self.episode.messages += new
        return Reply(
            new, self.episode.done, counts, tool_results=tuple(self.episode.tool_results[num_results:])
        )

    def act(self, base_url: str, api_key: str) -> None:
        """Run the environment's agent (AgentEnv)."""
        reach_directly(base_url)
        self._run(self._env.agent(self.episode, base_url, api_key))

    def reward(
        self,
        stop: StopReason = StopReason.STOP,
        untold: Sequence[Message] = (),
        turn_tokens: Sequence[Sequence[int]] = (),
        answers: Sequence[str] = (),
    ) -> Any:
        """What reward_episode() returned. untold and what follows it: what no `step` was told of."""
        self.episode.stop = stop
        self._hear(untold)
        self.episode.turn_tokens += turn_tokens
        self.episode.answers += answers
        return self._run(self._env.reward_episode(self.episode))

    def reward_group(self, members: Sequence[EndedEpisode]) -> Any:
        """What the environment's reward_group returns."""
        problem, rng = self.episode.problem, self.episode.rng
        episodes = [
            Episode(
                problem,
                rng,
                list(m.messages),
                stop=m.stop,
                turn_tokens=list(m.turn_tokens),
                answers=list(m.answers),
                turn_texts=list(m.turn_texts),
                num_opening=m.num_opening,
                tool_results=list(m.tool_results),
                notes=dict(m.notes),
            )
            for m in members
        ]
        return self._run(self._env.reward_group(episodes))

    def _hear(self, messages: Sequence[Message]) -> None:
        """The loop gives a turn's message its `text`, which stays out of the conversation."""
        for message in messages:
            if "text" in message:
                self.episode.turn_texts.append(message["text"])
            self.episode.messages.append({name: value for name, value in message.items() if name != "text"})

    def _call(self, call: Mapping[str, Any], counts: Counter[str]) -> Message:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        counts["tool_calls"] += 1
        try:
            if name not in self._tools:
                raise BadArguments(f"there is no tool {name}; there are {', '.join(self._tools) or 'none'}")
            content, failed = _as_text(self._run(self._tools[name].run(arguments, self.episode))), False
        except Exception as error:  # the policy is told, as a user would be
            if isinstance(known_in(error), Unavailable):
                raise
            cause = message_of(error) if isinstance(error, BadArguments) else one_line(error)
            content, failed = f"Error: {cause}", True
        counts["tool_errors"] += failed
        limit = self._env.max_result_chars
        if len(content) > limit:
            content = f"{content[:limit]}\n[cut: {len(content)} characters]"
            counts["cut_results"] += 1
        self.episode.tool_results.append(ToolResult(name, arguments, content, failed))
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    def _run(self, result: Any) -> Any:
        """Of a function that may be a coroutine."""
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(result)


def _as_text(result: object) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)


def _messages(value: object, method: str) -> list[Message] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence):
        raise BadReturn(f"{method}() returned {value!r:.60}; return a string, a list of messages, or None")
    if wrong := next(filter(None, map(wrong_with, value)), ""):
        raise BadReturn(f"{method}() returned {value!r:.60}: {wrong}")
    return [dict(message) for message in value]
