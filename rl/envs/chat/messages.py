"""Messages of a chat, checked where they come in: from an environment's code, or with an agent's request."""

from collections.abc import Mapping


def wrong_with(message: object) -> str:
    """What is wrong with a message in the form of OpenAI's API; empty where nothing is."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return "a message is an object with a role, as {'role': 'user', 'content': '...'}"
    content = message.get("content")
    if not isinstance(content, str | list | None):
        return "the content of a message is a text, or a list of parts"
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str) or not _is_text(part):
            kind = part.get("type") if isinstance(part, Mapping) else part
            return f"a part of type {kind!r:.40} is not offered: the policy reads text; leave it out"
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
        return 'tool_calls is a list of {"id", "type": "function", "function": {"name", "arguments"}}'
    return ""


def role_of(message: Mapping) -> str:
    """With the role that chat templates know in the place of `developer`."""
    return "system" if message["role"] == "developer" else str(message["role"])


def _is_text(part: Mapping) -> bool:
    return part.get("type", "text") == "text"


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), str | Mapping)
