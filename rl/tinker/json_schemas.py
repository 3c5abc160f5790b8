"""JSON schemas that answers are held to: of `response_format`, and of a tool that has to be called."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from rl.tinker.backend import UserError

_MAX_CHARACTERS = 32_768
_MAX_DEPTH = 64  # vLLM's
_DEFINITIONS = ("$defs", "definitions")  # a schema's references name them from its root


def schema_text(schema: object, name: str) -> str:
    """As generators take it. name: its name in messages. Raises UserError where it is no schema."""
    if not isinstance(schema, dict):
        raise UserError(f"{name} has to be a JSON schema, an object")
    if _depth(schema) > _MAX_DEPTH:
        raise UserError(f"{name} is nested over {_MAX_DEPTH} deep; make it flatter")
    text = json.dumps(schema)
    if len(text) > _MAX_CHARACTERS:
        raise UserError(f"{name} has {len(text)} characters of JSON; at most {_MAX_CHARACTERS} are offered")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise UserError(f"{name} is no JSON schema: {error.message[:200]}") from error
    return text


def _depth(value: object) -> int:
    """Of objects and lists within each other."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def of_response_format(response_format: Mapping[str, Any] | None) -> str:
    """Empty where any text will do."""
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return ""
    if kind == "json_object":
        return schema_text({"type": "object"}, "response_format")
    if kind != "json_schema":
        raise UserError(
            f"response_format of type {kind!r} is not offered here; use text, json_object or json_schema"
        )
    described = (response_format or {}).get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    return schema_text(schema, "response_format.json_schema.schema")


def of_one_call(tools: Sequence[Mapping[str, Any]]) -> str:
    """{"name", "arguments"} of one of the tools. tools: {name, parameters} each."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, dict[str, Any]] = {}
    for tool in tools:
        name = tool["name"]
        parameters = tool.get("parameters") or {"type": "object"}
        schema_text(parameters, f"the parameters of the tool {name!r}")
        for keyword in _DEFINITIONS:
            for key, value in parameters.get(keyword, {}).items():
                if definitions.setdefault(keyword, {}).setdefault(key, value) != value:
                    raise UserError(f"two tools have other definitions of {key!r}; rename one of them")
        arguments = {key: value for key, value in parameters.items() if key not in _DEFINITIONS}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    whole = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return schema_text({**whole, **definitions}, "the schema of all tools")
