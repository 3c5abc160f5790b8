"""TRL's reward functions and environment factories: their signatures, without the package."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.envs.chat.tools import Tool, as_tool
from rl.types import Message, Problem

RewardFunction = Callable[..., Sequence[float | None]]
"""reward(prompts, completions, completion_ids, **columns) -> a number for each, or None for no opinion."""


@dataclass(frozen=True)
class TRLTask(ChatEnv):
    """Rows of a dataset, each with `prompt`: a text, or messages. Its other columns go to the rewards.

    An environment of the factory has `reset(**row)`, whose text is added to the last user message; its other
    public methods are tools, and `get_reward()`, if it has one, is a reward.
    """

    rows: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    """A function that loads the dataset: a list of dictionaries, or a datasets.Dataset."""
    reward_funcs: tuple[RewardFunction, ...] = ()
    environment_factory: Callable[[], Any] | None = None
    num_eval: int = 64

    def generate(self, seed: int) -> Problem:
        rows = _loaded(self.rows)
        index = seed % len(rows)
        row = dict(rows[index])
        prompt = row.pop("prompt")
        is_text = isinstance(prompt, str)
        return Problem(str(index), prompt if is_text else "", "", row, () if is_text else tuple(prompt))

    def tools(self) -> Sequence[Tool]:
        if self.environment_factory is None:
            return ()
        made = self.environment_factory()
        return [_delegating(name, getattr(made, name)) for name in _tool_names(made)]

    def start(self, episode: Episode) -> None:
        if self.environment_factory is None:
            return
        made = episode.state["environment"] = self.environment_factory()
        row = {"prompt": episode.problem.question or list(episode.problem.messages)}
        if said := made.reset(**row, **episode.problem.metadata):
            last = episode.messages[-1]
            episode.messages[-1] = {**last, "content": f"{last['content']}{said}"}

    def reward_episode(self, episode: Episode) -> dict[str, float]:
        first = len(self.opening(episode.problem))
        completion: list[Message] = episode.messages[first:]
        prompt = episode.problem.question or list(episode.problem.messages)
        columns = {name: [value] for name, value in episode.problem.metadata.items()}
        tokens = [token for turn in episode.turn_tokens for token in turn]
        given = {"prompts": [prompt], "completions": [completion], "completion_ids": [tokens], **columns}
        found = {function.__name__: function(**given)[0] for function in self.reward_funcs}
        made = episode.state.get("environment")
        if made is not None and hasattr(made, "get_reward"):
            found["environment"] = made.get_reward()
        return {name: value for name, value in found.items() if value is not None}

    def validate(self) -> list[str]:
        if (count := len(_loaded(self.rows))) <= self.num_eval:
            return [f"env.rows gives {count} rows; give over env.num_eval={self.num_eval}"]
        if not self.reward_funcs and not hasattr(self.environment_factory, "get_reward"):
            return ["env.reward_funcs is empty and env.environment_factory has no get_reward; give a reward"]
        return []


@lru_cache(maxsize=8)
def _loaded(rows: Callable[[], Sequence[Mapping[str, Any]]]) -> Sequence[Mapping[str, Any]]:
    return rows()


def _tool_names(made: Any) -> list[str]:
    methods = inspect.getmembers(made, callable)
    return [n for n, _ in methods if not n.startswith("_") and n not in ("reset", "get_reward")]


def _delegating(name: str, method: Callable[..., Any]) -> Tool:
    """Described by this object's method, run by the episode's."""
    return Tool(
        as_tool(method).schema,
        lambda arguments, episode: as_tool(getattr(episode.state["environment"], name)).run(
            arguments, episode
        ),
    )
