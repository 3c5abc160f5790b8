"""ChatTemplate: messages to tokens by the model's own template, so that no sampled turn is tokenised again.

Templates are programs that write a whole conversation. What follows a turn that the policy has sampled is
found by writing a stand-in for the turn and taking what comes after it.
"""

import json
import keyword
import pickle
import uuid
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, get_args

from rl.envs.chat.tool_calls import (
    CallFormat,
    ParsedTurn,
    describe_tools,
    fold_tools,
    knows_tools,
    parse_turn,
    write_calls,
)
from rl.errors import ConfigError, one_line
from rl.interfaces import Tokenizer
from rl.types import Message

Schema = Mapping[str, Any]
"""A tool as OpenAI's API describes it: {"type": "function", "function": {name, description, parameters}}."""

_STRING = {"type": "string", "description": "x"}
_PARAMETERS = {"type": "object", "properties": {"x": _STRING}, "required": ["x"]}
_WRITES_NONE = "describes tools, but writes no calls: it does not show in which format they are"
_STAND_IN = "turn-" + uuid.UUID(int=0x5EED5EED5EED).hex


class ChatTemplate:
    """Raises ConfigError where the model has no template, or one whose turns do not end with a token."""

    def __init__(self, tokenizer: Tokenizer, written: CallFormat | None = None):
        """written: the format of tool calls; None: the template's own."""
        if not tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template, which a ChatEnv needs; add one")
        self._tokenizer = tokenizer
        self._folds = False  # until the template's own format is known
        self.written: CallFormat = "hermes"
        self.end_id, self._end = turn_end(tokenizer)
        own, writes_calls = self._own_format()
        self.written = written or own or "hermes"
        self._folds = not knows_tools(tokenizer.chat_template) or (
            writes_calls and written is not None and written != own
        )
        self._unreadable = ""  # why calls could not be read
        if not (self._folds or written or own):
            verb = "writes tool calls in a format that is not read here" if writes_calls else _WRITES_NONE
            self._unreadable = f"the model's chat template {verb}"
        self._pickled_prompt = lru_cache(maxsize=256)(self._render_pickled)  # a group's siblings begin alike

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """A whole conversation, ready for the assistant's turn."""
        return list(self._pickled_prompt(pickle.dumps((messages, tools))))

    def prompt_once(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """As `prompt`, which keeps what it has made for the next time."""
        if why := self.why_no_tools(tools):
            raise ConfigError(f"{why}; set env.call_format to hermes, which is then described to the model")
        return self._tokens(self._render(messages, tools))

    def _render_pickled(self, conversation: bytes) -> list[int]:
        return self.prompt_once(*pickle.loads(conversation))

    def continuation(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """What follows a sampled turn, after the token that ended it: `messages`, ready for the next turn."""
        for before in self._stand_ins(messages):
            try:
                text = self._render([*before, *messages], tools)
            except ConfigError:
                continue
            _, stand_in, rest = text.rpartition(_STAND_IN)
            _, ended, after = rest.partition(self._end)
            if stand_in and ended:
                return self._tokens(after)
        raise ConfigError(
            f"the model's chat template does not take {messages[0]['role']} messages after an assistant's "
            f"turn; use other roles, or another template"
        )

    def assistant_tokens(self, message: Message) -> list[int]:
        """A turn as the policy would write it: its content, its calls, and the end."""
        return [*self._tokens(self.written_turn(message)), self.end_id]

    def written_turn(self, message: Message) -> str:
        """Its content and its calls."""
        plain = for_template(message)
        calls = write_calls([call["function"] for call in plain.get("tool_calls", ())], self.written)
        return "\n".join(filter(None, [plain["content"], calls]))

    def _tokens(self, text: str) -> list[int]:
        """A tokenizer refuses half of a surrogate pair: a question mark stands for it."""
        return self._tokenizer.encode_plain(text.encode(errors="replace").decode())

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens).strip()

    def parse(self, text: str, has_tools: bool = True) -> ParsedTurn:
        """Of a turn that ended by itself. text: see `text`."""
        return parse_turn(text, self.written, has_tools)

    def _render(self, messages: Sequence[Message], tools: Sequence[Schema], prompt: bool = True) -> str:
        try:
            messages = [for_template(message) for message in messages]
            if self._folds:
                messages = fold_tools(messages, self.written)
                if tools:
                    messages = _with_system(messages, describe_tools(tools, self.written))
            return self._tokenizer.render(messages, () if self._folds else tools, prompt)
        except Exception as error:  # the template is a program
            raise _failed(error) from error

    def why_no_tools(self, tools: Sequence[Schema]) -> str:
        """Why calls of these could not be read; empty where they can."""
        if tools and self._unreadable:
            return self._unreadable
        functions = [tool["function"] for tool in tools if self.written == "pythonic"]
        odd = [
            name
            for function in functions
            for name in (function["name"], *((function.get("parameters") or {}).get("properties") or ()))
            if not name.isidentifier() or keyword.iskeyword(name)
        ]
        return f"{odd[0]!r} cannot be written in a call as in Python, as the model's are" if odd else ""

    def _own_format(self) -> tuple[CallFormat | None, bool]:
        """The format in which the template writes a call, so that it is read back; whether it writes any."""
        if not knows_tools(self._tokenizer.chat_template):
            return None, False
        function = {"name": "f", "arguments": {"x": _STAND_IN}}
        call = {"id": "call00000", "type": "function", "function": function}
        turns: list[Message] = [
            {"role": "assistant", "content": _STAND_IN},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        schema = {"name": "f", "description": "f", "parameters": _PARAMETERS}
        tools = [{"type": "function", "function": schema}]
        try:
            spoken, called = (
                self._render([{"role": "user", "content": "x"}, turn], tools, prompt=False) for turn in turns
            )
        except ConfigError:
            return None, True
        pairs = enumerate(zip(spoken, called, strict=False))
        begin = next((i for i, (a, b) in pairs if a != b), 0)
        turn = called[begin:]
        # As it is sampled, without special tokens; and as it is written: a vocabulary may lack letters of it.
        for text in (self.text(self._tokens(turn)), turn.partition(self._end)[0]):
            for written in get_args(CallFormat):
                calls = [(call.name, call.arguments) for call in parse_turn(text, written).calls]
                if calls == [("f", {"x": _STAND_IN})]:
                    return written, True
        return None, _STAND_IN in turn

    def _stand_ins(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Turns to write before `messages`; the first that the template takes serves."""
        user: Message = {"role": "user", "content": "x"}
        plain: Message = {"role": "assistant", "content": _STAND_IN}
        results = [message for message in messages if message["role"] == "tool"]
        if self._folds or not results:
            return [[user, plain]]
        calls = [
            {
                "id": result.get("tool_call_id", "call00000"),
                "type": "function",
                "function": {"name": result.get("name", "tool"), "arguments": {"x": _STAND_IN}},
            }
            for result in results
        ]
        called = [{"role": "assistant", "content": "", "tool_calls": part} for part in (calls, calls[:1])]
        return [*([user, turn] for turn in called), [user, plain]]


def turn_end(tokenizer: Tokenizer) -> tuple[int, str]:
    """The token that ends the assistant's turns in the model's chat template, and its text.

    Raises ConfigError where none does.
    """
    return _turn_end(tokenizer)  # type: ignore[arg-type]  # a tokenizer is hashable by identity


@lru_cache(maxsize=8)
def _turn_end(tokenizer: Any) -> tuple[int, str]:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _STAND_IN}]
    try:
        text = tokenizer.render(turns, (), False)
    except Exception as error:  # the template is a program
        raise _failed(error) from error
    _, stand_in, after = text.rpartition(_STAND_IN)
    tokens = tokenizer.encode_plain(after)
    if stand_in and tokens:
        end = tokenizer.decode_with_special(tokens[:1])
        if not tokenizer.decode(tokens[:1]) and after.startswith(end):
            return tokens[0], end
    raise ConfigError(
        "the model's chat template does not end the assistant's turn with a special token, so turns "
        "would not end; use a template that does"
    )


def _failed(error: Exception) -> ConfigError:
    return ConfigError(f"the model's chat template fails: {one_line(error):.200}")


def for_template(message: Message) -> Message:
    """As templates expect it: content is a text, and a call's arguments an object."""
    plain = {**message, "content": _text(message.get("content"))}
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return plain


def _text(content: object) -> str:
    """OpenAI's content: a text, nothing, or parts of which the texts are read."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _object(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]
