"""How models write tool calls: Hermes' (Qwen's) JSON in tags, Llama 3's bare JSON, and calls as in Python.

A call that cannot be read is not dropped: it comes back as text that says why, for the model to try again.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl.envs.chat.call_values import json_value
from rl.types import Message

CallFormat = Literal["hermes", "llama3", "pythonic"]

_MISNAMED = frozenset({"args", "params"})
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
THINK, _THOUGHT = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_CALL_CLOSED = re.compile(rf"\s*(?:{_CALL_END}|\Z)")
_NEXT_CALL = re.compile(r"\s*(?:;\s*(?=\{)|\Z)")
_LIST, _LIST_END = re.compile(r"(?m:^)[^\S\n]*\[\s*\w+\("), re.compile(r"\)\s*\]")
_NAMED = r'\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"\s*:'
_FIRST_CALL = re.compile(rf"<\|python_tag\|>|\A\s*(?=\{{)|(?m:^)\s*(?={_NAMED})")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: as the model wrote them, not yet checked against the tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a turn says and what it calls. `malformed`: what is wrong with each call that cannot be read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    reasoning: str = ""  # between <think> and </think>


def as_message(parsed: ParsedTurn, text: str, id_prefix: str) -> Message:
    """As OpenAI's API has it, with `reasoning_content` beside.

    Where a call cannot be read, the content is all of the text, and no call is listed.
    id_prefix: of the calls' ids, which end with their numbers.
    """
    if parsed.malformed:
        return {"role": "assistant", "content": text}
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": f"{id_prefix}{i:02d}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for i, call in enumerate(parsed.calls)
        ]
    return message


def knows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def parse_turn(text: str, written: CallFormat, has_tools: bool = True) -> ParsedTurn:
    """A complete turn of the model; of one that was cut off nothing should be called.

    Without tools nothing is a call: an answer in JSON is an answer.
    """
    reasoning, rest = _split_reasoning(text, written)
    parsed = _PARSERS[written](rest)
    if not has_tools and (parsed.calls or parsed.malformed):
        return ParsedTurn(rest.strip(), reasoning=reasoning)
    return ParsedTurn(parsed.content, parsed.calls, parsed.malformed, reasoning)


def _split_reasoning(text: str, written: CallFormat) -> tuple[str, str]:
    """The thoughts, whose opening tag may stand in the prompt, and the rest."""
    thoughts, tag, rest = text.partition(_THOUGHT)
    if not tag and text.lstrip().startswith(THINK):
        return text.lstrip().removeprefix(THINK).strip(), ""
    if not tag:
        return "", text
    if not text.lstrip().startswith(THINK):
        arguments = [call.arguments for call in _PARSERS[written](text).calls]
        if json.dumps(arguments).count(_THOUGHT) >= text.count(_THOUGHT):
            return "", text  # the tag is within what a call passes on
    return thoughts.replace(THINK, "").strip(), rest.strip()


def _hermes(text: str) -> ParsedTurn:
    calls: list[ToolCall] = []
    malformed: list[str] = []
    content: list[str] = []
    at = 0
    while (tag := text.find(_CALL, at)) >= 0:
        content.append(text[at:tag])
        try:
            call, end = _json_call(text, tag + len(_CALL), "arguments")
            closed = _CALL_CLOSED.match(text, end)
            if closed is None:
                raise _Unreadable(f"text follows the call's JSON; write {_CALL_END} after it", end)
            calls.append(call)
            at = closed.end()
        except _Unreadable as error:
            malformed.append(str(error))
            end = text.find(_CALL_END, error.end)
            at = len(text) if end < 0 else end + len(_CALL_END)
    content.append(text[at:])
    return ParsedTurn("".join(content).strip(), tuple(calls), tuple(malformed))


def _llama3(text: str) -> ParsedTurn:
    """The calls begin the text, or follow words: after the tag, or in a line that begins with a call."""
    start = _FIRST_CALL.search(text)
    body = text[start.end() :].strip() if start else ""
    if start is None or not body.startswith("{"):
        return ParsedTurn(text)
    if not start[0].strip() and _is_answer(body):
        return ParsedTurn(text)
    content = text[: start.start()].strip()
    calls: list[ToolCall] = []
    at = 0
    try:
        while at < len(body):
            call, end = _json_call(body, at, "parameters")
            following = _NEXT_CALL.match(body, end)
            if following is None:
                raise _Unreadable("text follows the call; write nothing but calls, as {...}; {...}", end)
            calls.append(call)
            at = following.end()
    except _Unreadable as error:
        return ParsedTurn(content, tuple(calls), (str(error),))
    return ParsedTurn(content, tuple(calls))


def _is_answer(text: str) -> bool:
    """Whether it is one JSON object, which names nothing to call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    calls = {"parameters", "arguments", *_MISNAMED} & value.keys() or value.keys() <= {"name", "type", "id"}
    return "name" not in value or not calls


class _Unreadable(ValueError):
    """Why a call cannot be read. `end`: where its JSON ends, or begins, where it is none."""

    def __init__(self, why: str, end: int):
        super().__init__(why)
        self.end = end


def _json_call(text: str, start: int, arguments_name: str) -> tuple[ToolCall, int]:
    """The call that begins at `start`, and where its JSON ends. Raises _Unreadable."""
    start = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches nothing, too
    try:
        call, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"the call is not JSON: {error}", start) from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _Unreadable("a call is a JSON object with a name", end)
    if misnamed := _MISNAMED & call.keys():
        raise _Unreadable(
            f"{min(misnamed)!r} is no part of a call; arguments are its {arguments_name!r}", end
        )
    alias = "parameters" if arguments_name == "arguments" else "arguments"
    arguments = call.get(arguments_name, call.get(alias, {}))
    if not isinstance(arguments, dict):
        raise _Unreadable(f"the {arguments_name} of {call['name']!a} are not a JSON object", end)
    try:
        return checked_call(call["name"], arguments), end
    except ValueError as error:
        raise _Unreadable(f"the call cannot be read: {error}", end) from error


def _pythonic(text: str) -> ParsedTurn:
    start = _LIST.search(text)
    ends = [end.end() for end in _LIST_END.finditer(text, start.end())] if start else []
    if start is None or not ends:
        begins = re.match(r"\s*\[\w*\(", text)
        return ParsedTurn(text, (), ("the call does not end with )]",) if begins else ())
    content = (text[: start.start()] + text[ends[-1] :]).strip()
    try:
        listed = ast.parse(text[start.start() : ends[-1]].strip(), mode="eval").body
        if not isinstance(listed, ast.List):  # two lists, of which the second is an index
            raise ValueError("write one list of calls")
        calls = [_python_call(call) for call in listed.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return ParsedTurn(content, (), (f"the call cannot be read: {error}",))
    return ParsedTurn(content, tuple(calls))


def _python_call(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError("write [name(argument=value)]")
    arguments = {k.arg: _literal(k.value) for k in call.keywords if k.arg is not None}
    if len(arguments) != len(call.keywords):
        raise ValueError("each argument has a name of its own")
    return checked_call(call.func.id, arguments)


def _literal(value: ast.expr) -> Any:
    """Raises ValueError in words that are the same in every process: they become tokens."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        raise ValueError("a value is a literal, as 3 or 'x'") from None


def checked_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """A call of values that JSON and UTF-8 can carry. Raises ValueError for others."""
    return ToolCall(json_value(name), json_value(arguments))


_PARSERS = {"hermes": _hermes, "llama3": _llama3, "pythonic": _pythonic}


def describe_tools(tools: Sequence[Mapping[str, Any]], written: CallFormat) -> str:
    """For the system message of a template that knows no tools."""
    how = {
        "hermes": '<tool_call>\n{"name": "the tool", "arguments": {"its": "arguments"}}\n</tool_call>',
        "llama3": '{"name": "the tool", "parameters": {"its": "arguments"}}',
        "pythonic": '[the_tool(its="arguments")]',
    }
    schemas = "\n".join(json.dumps(tool) for tool in tools)
    return f"You can call these tools:\n{schemas}\nTo call one, write:\n{how[written]}"


def fold_tools(messages: Sequence[Message], written: CallFormat) -> list[Message]:
    """Calls and results as plain text, for a template that knows none."""
    folded: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if folded and folded[-1].get("folded"):
                folded[-1] = {**folded[-1], "content": f"{folded[-1]['content']}\n{text}"}
            else:
                folded.append({"role": "user", "content": text, "folded": True})
        elif message.get("tool_calls"):
            calls = write_calls([call["function"] for call in message["tool_calls"]], written)
            text = "\n".join(filter(None, [message["content"], calls]))
            folded.append({"role": message["role"], "content": text})
        else:
            folded.append(message)
    return folded


def write_calls(functions: Sequence[Mapping[str, Any]], written: CallFormat) -> str:
    """The calls of one turn, as `parse_turn` reads them. functions: {name, arguments}, these as an object."""
    calls = [(function["name"], function["arguments"]) for function in functions]
    match written:
        case "hermes":
            texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        case "llama3":
            return "; ".join(json.dumps({"name": name, "parameters": values}) for name, values in calls)
        case "pythonic":
            texts = [f"{name}({','.join(f'{k}={v!r}' for k, v in values.items())})" for name, values in calls]
            return f"[{','.join(texts)}]" if texts else ""
