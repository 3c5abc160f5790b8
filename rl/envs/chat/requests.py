"""Requests of agents for a turn of the policy: which fields of OpenAI's and vLLM's API are accepted.

A field that is not listed here is refused by its name, for it would do nothing, or sample another policy than
the one that learns.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from rl.envs.chat.messages import role_of, wrong_with
from rl.types import Message

LABELS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
"""Accepted, and not read: they change no answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "chat_template_kwargs": ({},),
    "use_beam_search": (False,),
    "echo": (False,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Values that some clients always send, as good as leaving the field out; others are refused. So is null."""

_REMEDIES = {
    "seed": "the run's own seeds make samples reproducible; leave it out",
    "functions": "give tools in their place",
    "function_call": "give tools in its place",
    "tool_choice": "the policy chooses; leave it out, or leave the tools out where none may be called",
    "parallel_tool_calls": "the policy may call several tools at once; run the first, or leave it out",
    "top_logprobs": "only the sampled token's own logprob is there; leave it out",
    "max_turns": "it is a setting of the environment (env.max_turns)",
    "chat_template": "the model's own template is used; leave it out",
    "chat_template_kwargs": "the model's own template is used as it is; leave it out",
}
_OTHERS = "it would do nothing, or sample another policy than learns; leave it out"
_ROLES = ("system", "user", "assistant", "tool")
_UNREAD = ("audio", "function_call", "images", "refusal")  # of messages


class Refused(Exception):
    """An answer with this HTTP status. `code`: for programs, OpenAI's or `turns_used_up`."""

    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status = status
        self.code = code


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    function: _Function


class TurnRequest(BaseModel):
    """Fields that are read."""

    model_config = ConfigDict(extra="ignore", strict=True)

    messages: list[dict[str, Any]]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: Annotated[int, Ge(1)] | None = None
    max_completion_tokens: Annotated[int, Ge(1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @field_validator("tools")
    @classmethod
    def _described(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for tool in tools or ():
            if _Tool.model_validate(tool).type != "function":
                raise ValueError("only tools of type function are offered")
        return tools


ACCEPTED = frozenset(TurnRequest.model_fields) | frozenset(LABELS)
"""Whatever their value is, if its type is right."""


def read_request(data: bytes) -> TurnRequest:
    """Raises Refused, which names the field and the remedy."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or "messages" not in body:
        raise Refused(400, "the body is a JSON object with messages, each of which has a role")
    for name, value in body.items():
        _check_field(name, value)
    try:
        request = TurnRequest.model_validate(body)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise Refused(400, f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
    if request.tool_choice not in (None, "auto") and (request.tools or request.tool_choice != "none"):
        _refuse("tool_choice", request.tool_choice)
    if not request.messages:
        raise Refused(400, "messages must be a list of messages, each with a role")
    return request.model_copy(update={"messages": [_message(m) for m in request.messages]})


def _check_field(name: str, value: object) -> None:
    if value is None or name in ACCEPTED:
        return
    neutral = NEUTRAL.get(name, ())
    if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
        _refuse(name, value)


def _refuse(name: str, value: object) -> None:
    raise Refused(400, f"{name[:80]!s}={value!r:.60} is not offered here: {_REMEDIES.get(name, _OTHERS)}")


def _message(message: dict[str, Any]) -> Message:
    """With a role that chat templates know."""
    if wrong := wrong_with(message):
        raise Refused(400, f"messages: {wrong}")
    role = role_of(message)
    if role not in _ROLES:
        raise Refused(400, f"messages: the role {role!r:.40} is not offered; use {', '.join(_ROLES)}")
    if unread := [name for name in _UNREAD if message.get(name)]:
        raise Refused(400, f"messages: {unread[0]} is not offered: the policy reads text; leave it out")
    return {**message, "role": role}
