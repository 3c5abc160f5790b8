"""TRL's reward functions and environment factories: their signatures, without the package."""

import asyncio
import functools
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.envs.chat.tools import Tool, as_tool
from rl.types import Message, Problem

RewardFunction = Callable[..., Any]
"""reward(prompts, completions, completion_ids, **columns) -> a list of one number, or None for no opinion.

It may be async. Prompts and completions are texts for a row whose prompt is a text, lists of messages for a
row whose prompt is one, and for every row with an environment_factory.
"""
_EMPTY_PROMPT = ({"role": "user", "content": ""},)
_NO_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class TRLTask(ChatEnv):
    """Rows of a dataset, each with `prompt`: a text, or messages. Its other columns go to the rewards.

    An environment of the factory has `reset(**row)`, whose text is added to the last user message; its other
    public methods are tools, and `get_reward()`, if it has one, is a reward. Beside a factory, TRL asks for a
    prompt of messages; a text is made one here.
    """

    rows: Callable[[], Sequence[Mapping[str, Any]]] = tuple
    """A function that loads the dataset: a list of dictionaries, or a datasets.Dataset."""
    reward_funcs: tuple[RewardFunction, ...] = ()
    reward_weights: tuple[float, ...] = ()
    """One for each of reward_funcs; empty: 1 each."""
    environment_factory: Callable[[], Any] | None = None
    num_eval: int = 64

    def generate(self, seed: int) -> Problem:
        rows = _loaded(self.rows)
        index = seed % len(rows)
        row = dict(rows[index])
        prompt = row.pop("prompt", _EMPTY_PROMPT) if self.environment_factory else row.pop("prompt")
        is_text = isinstance(prompt, str)
        return Problem(str(index), prompt if is_text else "", "", row, () if is_text else tuple(prompt))

    def tools(self) -> Sequence[Tool]:
        if self.environment_factory is None:
            return ()
        environment = self.environment_factory()
        return [_delegating(name, getattr(environment, name)) for name in _tool_names(environment)]

    def start(self, episode: Episode) -> None:
        if self.environment_factory is not None:
            environment = episode.state["environment"] = self.environment_factory()
            has_prompt = episode.problem.messages != _EMPTY_PROMPT
            prompt = {"prompt": _asked(episode.problem)} if has_prompt else {}
            if observation := environment.reset(**prompt, **episode.problem.metadata):
                last, text = episode.messages[-1], _text(observation)
                more = [{"type": "text", "text": text}] if isinstance(last["content"], list) else text
                episode.messages[-1] = {**last, "content": last["content"] + more}
        episode.state["opening"] = list(episode.messages)

    def reward_episode(self, episode: Episode) -> Any:
        """A coroutine of the named rewards."""
        return self._rewards(episode)

    async def _rewards(self, episode: Episode) -> dict[str, float]:
        environment = episode.state.get("environment")
        arguments = self._arguments(episode, environment)
        rewards = []
        for name, function in zip(self._names(), self.reward_funcs, strict=True):
            rewards.append((name, function(**arguments)))
        if environment is not None and hasattr(environment, "get_reward"):
            rewards.append(("environment", environment.get_reward()))
        pending = [reward for _, reward in rewards if inspect.isawaitable(reward)]
        results = iter(await asyncio.gather(*pending))
        weights = (*(self.reward_weights or [1.0] * len(self.reward_funcs)), 1.0)
        components = {}
        for (name, reward), weight in zip(rewards, weights, strict=False):
            value = next(results) if inspect.isawaitable(reward) else reward
            value = value if name == "environment" else _only(name, value)
            if value is not None and not math.isnan(value):
                components[name] = weight * float(value)
        if not components:
            raise ValueError(f"no reward has an opinion of row {episode.problem.id}; give one for each row")
        return components

    def _arguments(self, episode: Episode, environment: Any) -> dict[str, Any]:
        """What TRL's trainer calls reward functions with, for a batch of one."""
        opening: list[Message] = episode.state["opening"]
        prompt: Any = [_as_trl_message(message) for message in opening]
        answers = episode.messages[len(opening) :]
        if environment is None:
            answers = list(_as_written(answers, episode.turn_texts))
        completion: Any = [_as_trl_message(message) for message in answers]
        if episode.problem.question and environment is None:
            prompt, completion = episode.problem.question, "".join(episode.turn_texts)
        columns = {n: [v] for n, v in episode.problem.metadata.items() if n not in _NO_COLUMNS}
        environments = {} if environment is None else {"environments": [environment]}
        tokens = [token for turn in episode.turn_tokens for token in turn]
        log = _Log(episode.notes)
        return {
            **columns,
            **environments,
            **{"prompts": [prompt], "completions": [completion], "completion_ids": [tokens]},
            **{"trainer_state": _NoTrainer(), "log_extra": log.extra, "log_metric": log.metric},
        }

    def _names(self) -> Sequence[str]:
        """One for each reward function, as TRL calls it; another of the same name has a number."""
        names, seen = [], Counter[str]()
        for function in self.reward_funcs:
            while isinstance(function, functools.partial):
                function = function.func
            name = getattr(function, "__name__", type(function).__name__)
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
        return names

    def validate(self) -> list[str]:
        for function in self.reward_funcs:
            if not callable(function):
                return [f"env.reward_funcs has {function!r:.60}; give functions, for models are not run here"]
        if self.environment_factory is not None and not callable(self.environment_factory):
            return ["env.environment_factory is not callable; give the factory of one environment"]
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            return [
                f"env.reward_weights has {len(self.reward_weights)} numbers for "
                f"{len(self.reward_funcs)} reward functions; give one for each"
            ]
        if (count := len(_loaded(self.rows))) <= self.num_eval:
            return [f"env.rows gives {count} rows; give over env.num_eval={self.num_eval}"]
        if not self.reward_funcs and not self._environment_rewards():
            return ["env.reward_funcs is empty and env.environment_factory has no get_reward; give a reward"]
        return []

    def _environment_rewards(self) -> bool:
        if self.environment_factory is None:
            return False
        return hasattr(self.environment_factory, "get_reward") or hasattr(
            self.environment_factory(), "get_reward"
        )


class _NoTrainer:
    """In place of TRL's trainer_state: rewards are computed beside training, at no step of it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not known here: episodes of several steps are under way at once; "
            f"use a reward that does not depend on the step"
        )


class _Log:
    """TRL's log_extra and log_metric: what they are told stands in rollouts.jsonl, as the notes."""

    def __init__(self, notes: dict[str, Any]):
        self._notes, self._metrics = notes, dict[str, float]()

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self._notes[column] = values[0]

    def metric(self, name: str, value: float) -> None:
        self._metrics[name] = float(value)
        self._notes.setdefault("metrics", self._metrics)  # unless a column has this name


@lru_cache(maxsize=8)
def _loaded(rows: Callable[[], Sequence[Mapping[str, Any]]]) -> Sequence[Mapping[str, Any]]:
    return rows()


def _asked(problem: Problem) -> str | list[Message]:
    """The row's prompt."""
    return problem.question or list(problem.messages)


def _only(name: str, rewards: Any) -> Any:
    """Of the batch of one."""
    if not hasattr(rewards, "__len__") or isinstance(rewards, str) or len(rewards) != 1:
        raise ValueError(f"the reward function {name} returned {rewards!r:.60}; return a list of one number")
    return rewards[0]


def _text(observation: Any) -> str:
    """What reset() returned. Raises ValueError for images."""
    if isinstance(observation, str):
        return observation
    texts = [block.get("text") for block in observation]
    if None in texts:
        raise ValueError("reset() returned more than text; policies here see text only")
    return "".join(texts)


def _as_written(messages: Sequence[Message], texts: Sequence[str]) -> Iterator[Message]:
    """The policy's turns as TRL has them where there are no tools: nothing is taken out of their text."""
    written = iter(texts)
    for message in messages:
        is_policys = message["role"] == "assistant" and not message.get("given")
        yield {"role": "assistant", "content": next(written)} if is_policys else message


def _as_trl_message(message: Message) -> Message:
    """With calls' arguments as objects, and without what is ours: ids and marks."""
    kept = {n: v for n, v in message.items() if n not in ("given", "tool_call_id")}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_as_trl_call(call["function"]) for call in calls]
    return kept


def _as_trl_call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.loads(function["arguments"])
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool_names(environment: Any) -> list[str]:
    """Of the class, for an object's properties would run."""
    methods = inspect.getmembers(type(environment), inspect.isfunction)
    return [n for n, _ in methods if not n.startswith("_") and n not in ("reset", "get_reward")]


def _delegating(name: str, method: Callable[..., Any]) -> Tool:
    """Described by this object's method, run by the episode's."""
    return Tool(
        as_tool(method).schema,
        lambda arguments, episode: as_tool(getattr(episode.state["environment"], name)).run(
            arguments, episode
        ),
    )
