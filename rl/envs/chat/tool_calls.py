"""How models write tool calls: Hermes' (Qwen's) JSON in tags, Llama 3's bare JSON, and calls as in Python.

A call that cannot be read is not dropped: it comes back as text that says why, for the model to try again.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl.errors import ConfigError
from rl.types import Message

CallFormat = Literal["hermes", "llama3", "pythonic"]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_BRACKETED = re.compile(r"\[\s*\w+\(.*\)\s*\]", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


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
    """As OpenAI's API has it. Where a call cannot be read, the content is all of the text.

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


def call_format(template: str) -> CallFormat:
    """Which format a chat template asks for. One that knows no tools gets Hermes', described in words.

    Raises ConfigError for a format that is not known here.
    """
    if "<function=" in template or "<|channel|>" in template:
        raise ConfigError(
            "the model's chat template writes tool calls in a format that is not read here; "
            "set env.call_format to hermes, llama3 or pythonic, which is then described to the model"
        )
    if "<tool_call>" in template or not knows_tools(template):
        return "hermes"
    return "llama3" if "parameters" in template else "pythonic"


def knows_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def parse_turn(text: str, written: CallFormat) -> ParsedTurn:
    """A complete turn of the model; of one that was cut off nothing should be called."""
    head, tag, rest = text.rpartition("</think>")
    reasoning = head.replace("<think>", "").strip() if tag else ""
    parsed = _PARSERS[written](rest.strip() if tag else text)
    return ParsedTurn(parsed.content, parsed.calls, parsed.malformed, reasoning)


def _hermes(text: str) -> ParsedTurn:
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for body in _TAGGED.findall(text):
        _read(body, "arguments", calls, malformed)
    return ParsedTurn(_TAGGED.sub("", text).strip(), tuple(calls), tuple(malformed))


def _llama3(text: str) -> ParsedTurn:
    body = text.removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        return ParsedTurn(text)
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for part in re.split(r";\s*(?=\{)", body):
        _read(part, "parameters", calls, malformed)
    return ParsedTurn("", tuple(calls), tuple(malformed))


def _read(body: str, arguments_name: str, calls: list[ToolCall], malformed: list[str]) -> None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        malformed.append(f"the call is not JSON: {error}")
        return
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        malformed.append("a call is a JSON object with a name")
        return
    other = "parameters" if arguments_name == "arguments" else "arguments"
    arguments = call.get(arguments_name, call.get(other, {}))
    if not isinstance(arguments, dict):
        malformed.append(f"the {arguments_name} of {call['name']} are not a JSON object")
        return
    calls.append(ToolCall(call["name"], arguments))


def _pythonic(text: str) -> ParsedTurn:
    found = _BRACKETED.search(text)
    if found is None:
        started = re.match(r"\s*\[\w*\(", text)
        return ParsedTurn(text, (), ("the call does not end with )]",) if started else ())
    content = (text[: found.start()] + text[found.end() :]).strip()
    try:
        listed = ast.parse(found[0], mode="eval").body
        if not isinstance(listed, ast.List):  # two lists, of which the second is an index
            raise ValueError("write one list of calls")
        calls = [_python_call(call) for call in listed.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ParsedTurn(content, (), (f"the call cannot be read: {error}",))
    return ParsedTurn(content, tuple(calls))


def _python_call(call: ast.expr) -> ToolCall:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError("write [name(argument=value)]")
    arguments = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
    if len(arguments) != len(call.keywords):
        raise ValueError("each argument has a name of its own")
    return ToolCall(call.func.id, arguments)


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
            calls = [write_call(call["function"], written) for call in message["tool_calls"]]
            text = "\n".join(filter(None, [message["content"], *calls]))
            folded.append({"role": message["role"], "content": text})
        else:
            folded.append(message)
    return folded


def write_call(function: Mapping[str, Any], written: CallFormat) -> str:
    """function: {name, arguments}, the arguments as an object."""
    name, arguments = function["name"], function["arguments"]
    match written:
        case "hermes":
            return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        case "llama3":
            return json.dumps({"name": name, "parameters": arguments})
        case "pythonic":
            return f"[{name}({','.join(f'{k}={v!r}' for k, v in arguments.items())})]"
