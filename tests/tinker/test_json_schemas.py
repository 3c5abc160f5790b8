"""What answers are held to, by the library that vLLM holds them with; and what is no schema."""

# holds: exact

import json

import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.tinker.backend import UserError
from rl.tinker.json_schemas import of_one_call, of_response_format, schema_text

CITY = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"enum": ["Bern", "Rom"]}},
    },
}
TIME = {"name": "time"}


def accepts(schema):
    """text -> whether it may be an answer, by bytes as tokens."""
    xgrammar = pytest.importorskip("xgrammar", reason="comes with vLLM")
    vocabulary = [bytes([i]) for i in range(256)] + [b"<eos>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
    grammar = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(schema)

    def may_be(text):
        matcher = xgrammar.GrammarMatcher(grammar)
        return matcher.accept_string(text) and matcher.accept_token(256)

    return may_be


def test_an_answer_is_one_call_of_one_tool():
    may_be = accepts(of_one_call([CITY, TIME]))
    for good in (
        {"name": "weather", "arguments": {"city": "Bern"}},
        {"name": "time", "arguments": {}},
        {"name": "time", "arguments": {"zone": 1}},
    ):
        assert may_be(json.dumps(good)), good
    for bad in (
        {"name": "other", "arguments": {}},
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "weather", "arguments": {}},
        {"name": "time"},
        [],
    ):
        assert not may_be(json.dumps(bad)), bad
    assert not may_be("The weather")
    named = accepts(of_one_call([CITY]))
    assert named(json.dumps({"name": "weather", "arguments": {"city": "Rom"}}))
    assert not named(json.dumps({"name": "time", "arguments": {}}))


def test_json_is_an_object():
    may_be = accepts(of_response_format({"type": "json_object"}))
    assert may_be('{"a": [1, {"b": null}]}') and not may_be("[1]") and not may_be("a")
    assert of_response_format(None) == of_response_format({"type": "text"}) == ""


def nested(depth):
    return {"type": "string"} if not depth else {"type": "array", "items": nested(depth - 1)}


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        (True, "has to be a JSON schema, an object"),
        (None, "has to be a JSON schema, an object"),
        ({"type": "thing"}, "x is no JSON schema: 'thing' is not valid"),
        ({"properties": [1]}, "x is no JSON schema"),
        ({"enum": ["y" * 40_000]}, "x has 40014 characters of JSON; at most 32768 are offered"),
        (nested(64), "x is nested over 64 deep; make it flatter"),
        (nested(900), "x is nested over 64 deep; make it flatter"),
    ],
)
def test_what_is_no_schema_is_refused(schema, match):
    with pytest.raises(UserError, match=match):
        schema_text(schema, "x")


def test_tools_that_mean_different_things_by_a_name_are_refused():
    other = {"name": "other", "parameters": {"type": "object", "$defs": {"City": {"type": "integer"}}}}
    with pytest.raises(UserError, match="two tools have other definitions of 'City'; rename one of them"):
        of_one_call([CITY, other])
