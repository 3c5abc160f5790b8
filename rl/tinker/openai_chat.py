"""A chat request as a prompt, and what is sampled as the assistant's message.

Tools are described and called as the model's own chat template has it (see rl/envs/chat). Where a tool has
to be called, the answer is held to the JSON of one call.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rl.envs.chat.messages import role_of
from rl.envs.chat.template import ChatTemplate, for_template
from rl.envs.chat.tool_calls import THINK, CallFormat, ParsedTurn, ToolCall, as_message
from rl.errors import ConfigError
from rl.models.tokenizer import HFTokenizer
from rl.tinker.backend import UserError
from rl.tinker.json_schemas import of_one_call, of_response_format
from rl.types import Message, StopReason

_THOUGHT = "</think>"
_FINISH = {StopReason.STOP: "stop", StopReason.LENGTH: "length"}
_CALL_MARKS: Mapping[CallFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "llama3": ("<|python_tag|>", "{"),
    "pythonic": ("[",),
}
"""What a call begins with: text from there on is sent when the turn is complete."""


class Part(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Function(BaseModel):
    name: str
    arguments: str | dict[str, Any]


class Call(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None


class Described(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Described


class Named(BaseModel):
    name: str


class Choice(BaseModel):
    type: Literal["function"]
    function: Named


class Chats:
    """Of one model."""

    def __init__(self, tokenizer: HFTokenizer):
        self._tokenizer = tokenizer

    @cached_property
    def _template(self) -> ChatTemplate | ConfigError:
        try:
            return ChatTemplate(self._tokenizer)
        except ConfigError as error:
            return error

    def prompt(self, messages: Sequence[ChatMessage], turn: "Turn") -> list[int]:
        """Raises UserError where the model's chat template does not take them."""
        if why := self._tokenizer.why_no_chat():
            raise UserError(f"the model {why}; use /v1/completions")
        plain = [_plain(message) for message in messages]
        tools = [tool.model_dump(exclude_none=True) for tool in turn.tools]
        try:
            if isinstance(self._template, ConfigError):
                return self._tokenizer.encode_messages([for_template(message) for message in plain])
            return self._template.prompt_once(plain, tools)
        except Exception as error:  # the template is a program
            raise UserError(f"the model's chat template does not take these messages: {error}") from error

    def turn(
        self,
        tools: Sequence[Tool],
        tool_choice: str | Choice | None,
        response_format: Mapping[str, Any] | None,
        parallel: bool,
    ) -> "Turn":
        """What the answer has to be. Raises UserError for what is not offered."""
        schema = of_response_format(response_format)
        if tool_choice == "none":
            tools = ()
        if not tools:
            if tool_choice not in (None, "none", "auto"):
                raise UserError(f"tool_choice is {tool_choice!r} without tools; send tools, or leave it out")
            return Turn((), schema)
        if schema:
            raise UserError("response_format is not offered with tools here; set tool_choice to none")
        if isinstance(self._template, ConfigError):
            raise UserError(f"tools are not offered with this model: {self._template}")
        if why := self._template.why_no_tools([tool.model_dump(exclude_none=True) for tool in tools]):
            raise UserError(f"tools are not offered with this model: {why}")
        if isinstance(tool_choice, Choice):
            named = [tool for tool in tools if tool.function.name == tool_choice.function.name]
            if not named:
                raise UserError(
                    f"tool_choice names {tool_choice.function.name!r}, which is none of the tools"
                )
            return Turn(tools, of_one_call([tool.function.model_dump() for tool in named]))
        if tool_choice == "required":
            return Turn(tools, of_one_call([tool.function.model_dump() for tool in tools]))
        if tool_choice not in (None, "auto"):
            raise UserError(f"tool_choice={tool_choice!r}; use none, auto, required or one function")
        return Turn(tools, "", self._template.parse, self._template.written, parallel)


@dataclass(frozen=True)
class Turn:
    """What the assistant's turn may be, and how it is read."""

    tools: Sequence[Tool]
    schema: str  # of the text; with tools, of one call; empty where any text will do
    parse: Callable[[str], ParsedTurn] | None = None  # where it may call tools, or not
    written: CallFormat = "hermes"
    parallel: bool = True

    def read(self, text: str, stop: StopReason) -> ParsedTurn | None:
        """Of the whole text. None where it is plain text: no tools, cut off, or no call that can be read."""
        if not self.tools or stop is not StopReason.STOP:
            return None
        if self.parse is None:
            return _one_call(text)
        parsed = self.parse(text.strip())
        if parsed.malformed:
            return None
        return parsed if self.parallel else replace(parsed, calls=parsed.calls[:1])

    def message(self, text: str, stop: StopReason) -> tuple[Message, str]:
        """(the assistant's message, the finish reason). text: all of it."""
        parsed = self.read(text, stop)
        if parsed is None:
            return {"role": "assistant", "content": text}, _FINISH[stop]
        return _as_message(parsed), "tool_calls" if parsed.calls else _FINISH[stop]


class Deltas:
    """One turn as the deltas of a stream."""

    def __init__(self, turn: Turn, thinks: bool = False):
        """thinks: whether the prompt ends within the reasoning."""
        self._turn = turn
        self._text = self._prompted = THINK if thinks and turn.parse else ""
        self._sent = {"reasoning_content": "", "content": ""}
        self._begun = False

    def next(self, text: str, end: StopReason | None) -> tuple[dict[str, Any], str | None]:
        """(a delta, the finish reason). text: since the last one. end: None where more comes."""
        self._text += text
        if end is None:
            return self._delta(self._shown()), None
        parsed = self._turn.read(self._text, end)
        if parsed is None:
            kind = "reasoning_content" if self._turn.tools and _is_thought(self._text) else "content"
            return self._delta({kind: self._sent[kind] + self._unsent()}), _FINISH[end]
        fields = {"reasoning_content": parsed.reasoning, "content": parsed.content}
        for name, sent in self._sent.items():
            if not fields[name].startswith(sent) and not sent.startswith(fields[name]):
                self._sent[name] = ""  # words before the thoughts: they stay with the client
        delta = self._delta(fields)
        if calls := _as_message(parsed).get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return delta, "tool_calls" if parsed.calls else _FINISH[end]

    def _shown(self) -> Mapping[str, str]:
        if not self._turn.tools:
            return {"content": self._text}
        return {} if self._turn.schema else shown(self._text, self._turn.written)

    def _unsent(self) -> str:
        start = len(self._prompted)
        for sent in self._sent.values():
            start = self._text.find(sent, start) + len(sent)
        return self._text[start:]

    def _delta(self, fields: Mapping[str, str]) -> dict[str, Any]:
        """What of the fields has not been sent."""
        delta: dict[str, Any] = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        for name, value in fields.items():
            sent = self._sent[name]
            if len(value) > len(sent) and value.startswith(sent):
                delta[name] = value[len(sent) :]
                self._sent[name] = value
        return delta


def _as_message(parsed: ParsedTurn) -> Message:
    return as_message(parsed, "", f"call_{secrets.token_hex(8)}")


def _one_call(text: str) -> ParsedTurn | None:
    try:
        call = json.loads(text)
        return ParsedTurn("", (ToolCall(call["name"], call["arguments"]),))
    except (ValueError, KeyError, TypeError):
        return None


def _is_thought(text: str) -> bool:
    """Whether it ends within the reasoning."""
    return text.lstrip().startswith(THINK) and _THOUGHT not in text


def shown(text: str, written: CallFormat) -> dict[str, str]:
    """What of a turn under way will stay: its reasoning, and its content up to what may be a call."""
    thoughts, tag, rest = text.rpartition(_THOUGHT)
    if tag:
        return {"reasoning_content": thoughts.replace(THINK, "").strip()} | _content(rest, written)
    begun = text.lstrip()
    if _is_thought(text):
        return {"reasoning_content": _before(begun.removeprefix(THINK), (_THOUGHT,)).strip()}
    return {} if THINK.startswith(begun) else _content(text, written)


def _content(text: str, written: CallFormat) -> dict[str, str]:
    return {"content": _before(text, _CALL_MARKS[written]).strip()}


def _before(text: str, marks: Sequence[str]) -> str:
    """The text before any of the marks, and before what may be the beginning of one."""
    text = text[: min((text.find(mark) for mark in marks if mark in text), default=len(text))]
    starts = [mark[:n] for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])]
    return text[: len(text) - max(map(len, starts), default=0)]


def _plain(message: ChatMessage) -> dict[str, Any]:
    """For the chat template. Raises UserError for content that is no text."""
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise UserError(f"content of type {part.type[:80]!r} is not offered here; send text")
    plain = message.model_dump(exclude_none=True)
    return plain | {"role": role_of(plain)}
