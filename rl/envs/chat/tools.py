"""Tools: methods and functions that the policy may call, described by their type hints and docstrings."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rl.envs.chat.template import Schema
from rl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
_EPISODE = "episode"


def tool(method: F) -> F:
    """Offer a method of a ChatEnv to the policy.

    What it returns is the text that the policy sees. A parameter named `episode` is filled in with the
    Episode, and is not shown to the policy. What it raises is told to the policy, as an error.
    """
    method.__is_tool__ = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True)
class Tool:
    """Something to call by name with arguments from JSON."""

    schema: Schema
    run: Callable[[Mapping[str, Any], Any], Any]
    """run(arguments, episode). May raise BadArguments; may return an awaitable."""

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]


class BadArguments(Exception):
    """The policy's arguments do not suit the tool; what to do about it."""


def tools_of(env: object) -> list[Tool]:
    """The methods that are marked with @tool, in the order of the class."""
    names = dict.fromkeys(n for made_of in reversed(type(env).__mro__) for n in vars(made_of))
    methods = [getattr(env, name) for name in names if hasattr(getattr(type(env), name, None), "__is_tool__")]
    return [as_tool(method) for method in methods]


def as_tool(function: Callable[..., Any]) -> Tool:
    """Raises ConfigError where its parameters cannot be described."""
    name = function.__name__
    if not inspect.getdoc(function):
        raise ConfigError(f"the tool {name} has no docstring, by which the policy would know it; write one")
    try:
        hints = get_type_hints(function)
        parameters = dict(inspect.signature(function).parameters)
        wants_episode = parameters.pop(_EPISODE, None) is not None
        described = docstring_parser.parse(inspect.getdoc(function) or "")
        texts = {param.arg_name: param.description for param in described.params}
        bare = [parameter for parameter in parameters if parameter not in hints]
        unknown = [text for text in texts if text not in parameters]
        unnamed = [p for p in parameters.values() if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        fields: dict[str, Any] = {
            p.name: (
                hints.get(p.name, Any),
                Field(... if p.default is p.empty else p.default, description=texts.get(p.name)),
            )
            for p in parameters.values()
        }
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        shape = model.model_json_schema()
    except Exception as error:  # whatever a type hint of the user's makes of pydantic
        raise ConfigError(
            f"the tool {name} cannot be described ({error}); give its parameters types that JSON knows"
        ) from error
    if unnamed:
        raise ConfigError(
            f"the tool {name} takes {unnamed[0]}, which cannot be called by name; name each parameter"
        )
    if bare:
        raise ConfigError(f"the tool {name} has no type hint for {bare[0]}; write one, as {bare[0]}: str")
    if unknown:
        raise ConfigError(f"the docstring of the tool {name} describes {unknown[0]}, which it does not take")
    about = "\n".join(filter(None, [described.short_description, described.long_description]))
    schema = {"name": name, "description": about, "parameters": _plain(shape)}

    def run(arguments: Mapping[str, Any], episode: Any) -> Any:
        checked = _checked(model, arguments)
        return function(**checked, **({_EPISODE: episode} if wants_episode else {}))

    return Tool({"type": "function", "function": schema}, run)


def _checked(model: type[BaseModel], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        validated = model.model_validate(arguments)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise BadArguments("; ".join(wrong)) from None
    return {name: getattr(validated, name) for name in type(validated).model_fields}


def _plain(shape: Any) -> Any:
    """A JSON schema without pydantic's titles, which templates would show to the policy."""
    if isinstance(shape, dict):
        return {k: _plain(v) for k, v in shape.items() if not (k == "title" and isinstance(v, str))}
    return [_plain(part) for part in shape] if isinstance(shape, list) else shape
