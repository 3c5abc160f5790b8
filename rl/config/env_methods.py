"""Whether an environment's methods can be called as a run calls them: parameters, async, tools, programs."""

import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from rl.envs.base import Env
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.tools import Tool
from rl.errors import ConfigError
from rl.fields import shown

_MAY_BE_ASYNC = {"drive", "start", "step", "reward_episode", "reward_group", "agent"}


def wrong_methods(env: Env) -> list[str]:
    """One line for each method that a run cannot call, with the place of it."""
    problems = [line for name, asked in _asked(env) for line in _wrong_method(env, name, asked)]
    if isinstance(env, ChatEnv) and not problems:
        problems += _wrong_tools(env)
    if isinstance(env, AgentEnv):
        problems += _wrong_agent(env)
    return problems


def _asked(env: Env) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name and declaration of each method that a class of the user's has in place of ours."""
    bases = [base for base in (AgentEnv, ChatEnv, Env) if isinstance(env, base)]
    for name in dict.fromkeys(name for base in bases for name in vars(base)):
        declared = next(vars(base)[name] for base in bases if name in vars(base))
        if name.startswith("_") or not inspect.isfunction(declared):
            continue
        if getattr(type(env), name) is not declared:
            yield name, declared


def _wrong_method(env: Env, name: str, declared: Callable[..., Any]) -> list[str]:
    method = getattr(env, name)
    asked = [p for p in inspect.signature(declared).parameters if p != "self"]
    wanted = f"write def {name}({', '.join(['self', *asked])})"
    if not callable(method):
        return [f"env {type(env).__name__}.{name} is {shown(method)}, which cannot be called; {wanted}"]
    where = f"env {type(env).__name__}.{name}{_place(method)}"
    try:
        signature = inspect.signature(method)
        signature.bind(*asked)
    except ValueError:  # of a function that is not written in Python
        return []
    except TypeError:
        return [f"{where} cannot be called with ({', '.join(asked)}), but takes {signature}; {wanted}"]
    awaited = name in _MAY_BE_ASYNC or (name == "reward" and isinstance(env, ChatEnv))
    if not awaited and (inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)):
        return [f"{where} is async, which nothing awaits; {wanted}"]
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        return [f"{where} yields, so that it returns nothing; use return"]
    return []


def _place(method: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f" ({os.path.basename(code.co_filename)} line {code.co_firstlineno})" if code else ""


def _wrong_tools(env: ChatEnv) -> list[str]:
    try:
        tools = env.tools()
        wrong = next((tool for tool in tools if not isinstance(tool, Tool)), None)
    except Exception as error:
        if env.validate():  # what it says comes next
            return []
        if not isinstance(error, ConfigError):
            raise
        return [f"env {type(env).__name__}: {error}"]
    if wrong is not None:
        return [f"env {type(env).__name__}.tools() returned {shown(wrong)}; return what as_tool() makes"]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        return [f"env {type(env).__name__} has two tools named {twice[0]}; rename one"]
    return []


def _wrong_agent(env: AgentEnv) -> list[str]:
    if not env.command:
        if type(env).agent is not AgentEnv.agent:
            return []
        return [
            f"env {type(env).__name__} has no agent(self, episode, base_url, api_key), and no command; "
            f"add one of them"
        ]
    if shutil.which(os.path.expanduser(env.command[0])) is None:
        return [
            f"env.command begins with {shown(env.command[0])}, which is no program here; give the path of one"
        ]
    return []
