import pytest

from rl.envs.chat.template import ChatTemplate
from rl.envs.chat.tool_calls import (
    ParsedTurn,
    ToolCall,
    describe_tools,
    fold_tools,
    parse_turn,
    write_calls,
)
from tests.envs.chat.templates import make_tokenizer

CALL = ToolCall("price", {"fruit": "pear", "count": 2})
FUNCTION = {"name": "price", "arguments": {"fruit": "pear", "count": 2}}


@pytest.mark.parametrize("written", ["hermes", "llama3", "pythonic"])
def test_what_is_written_is_read_again(written):
    parsed = parse_turn(write_calls([FUNCTION], written), written)
    assert (parsed.calls, parsed.malformed, parsed.content) == ((CALL,), (), "")


@pytest.mark.parametrize("written", ["hermes", "llama3", "pythonic"])
def test_two_calls_of_one_turn_are_written_as_they_are_read(tmp_path, written):
    """In a demonstration, and in what a template that knows no tools is told of earlier turns."""
    calls = [{"id": str(i), "type": "function", "function": FUNCTION} for i in range(2)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    template = ChatTemplate(make_tokenizer("qwen2_5", tmp_path), written)
    for text in (template.written_turn(message), fold_tools([message], written)[0]["content"]):
        parsed = parse_turn(text, written)
        assert (parsed.calls, parsed.malformed) == ((CALL, CALL), ())


def test_what_is_told_of_a_call_that_cannot_be_read_is_the_same_in_every_process():
    """It becomes tokens: a place in memory among them would make two equal runs differ."""
    for argument in ("a", "f(1)", "1 + a", "[x]", "lambda: 1"):
        (told,) = parse_turn(f"[mul(a={argument}, b=86)]", "pythonic").malformed
        assert told == "the call cannot be read: a value is a literal, as 3 or 'x'"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', "hermes"),
        ('{"name": "a", "arguments": {"x": 1}}', "llama3"),
    ],
)
def test_arguments_may_have_the_other_formats_name(text, written):
    assert parse_turn(text, written).calls == (ToolCall("a", {"x": 1}),)


def test_words_around_calls_are_the_content_and_calls_keep_their_order():
    text = (
        'First.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    )
    parsed = parse_turn(text, "hermes")
    assert parsed.content == "First." and [call.name for call in parsed.calls] == ["a", "b"]
    two = parse_turn('{"name": "a", "parameters": {"x": "};{"}}; {"name": "b", "parameters": {}}', "llama3")
    assert [call.name for call in two.calls] == ["a", "b"] and not two.malformed
    call = '{"name": "a", "parameters": {}}'
    for text in (
        f"First.\n{call}",
        f"First.\n\n  {call}; {call}",
        f"First.<|python_tag|>{call}",
        f"First. <|python_tag|> {call}",
    ):
        first = parse_turn(text, "llama3")
        assert first.content == "First." and {c.name for c in first.calls} == {"a"} and not first.malformed
    for text in (
        f"As in {call}, so here.",
        f"First. {call}",
        "<|python_tag|>print(1)",
        'Data:\n{"x": 1}',
        'It is:\n{"name": "a"}',
    ):
        assert parse_turn(text, "llama3") == ParsedTurn(text)
    several = parse_turn("[a(x=1), b(y='2')]", "pythonic")
    assert several.calls == (ToolCall("a", {"x": 1}), ToolCall("b", {"y": "2"}))


@pytest.mark.parametrize(
    ("text", "written", "why"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "hermes", "not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "hermes", "with a name"),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "hermes", "not a JSON object"),
        ('<tool_call>{"name": "a"', "hermes", "not JSON"),
        ('{"name": "a", "parameters": ', "llama3", "not JSON"),
        ("[price(fruit=open('x'))]", "pythonic", "cannot be read"),
        ("[price('pear')]", "pythonic", "argument=value"),
        ("[price(fruit=1", "pythonic", "does not end"),
        ("[price(**{'fruit': 'pear'})]", "pythonic", "a name of its own"),
        ("[price(x=1)][price(x=2)]", "pythonic", "write one list of calls"),
    ],
)
def test_a_call_that_cannot_be_read_is_named_and_not_made(text, written, why):
    parsed = parse_turn(text, written)
    assert not parsed.calls and len(parsed.malformed) == 1 and why in parsed.malformed[0]


def test_what_follows_a_call_that_cannot_be_read_is_read():
    text = '<tool_call>{"name": 1}</tool_call> then <tool_call>{"name": "b"}</tool_call> so'
    parsed = parse_turn(text, "hermes")
    assert [call.name for call in parsed.calls] == ["b"] and len(parsed.malformed) == 1
    assert parsed.content.split() == ["then", "so"]


def test_calls_are_read_after_the_thinking_only():
    text = '<think>perhaps <tool_call>{"name": "a"}</tool_call></think>No.'
    parsed = parse_turn(text, "hermes")
    assert not parsed.calls and parsed.content == "No." and "perhaps" in parsed.reasoning


def test_a_template_without_tools_gets_them_as_text():
    schema = {"type": "function", "function": {"name": "price"}}
    assert '"price"' in describe_tools([schema], "hermes") and "<tool_call>" in describe_tools([], "hermes")
    messages = [
        {"role": "assistant", "content": "Look.", "tool_calls": [{"function": FUNCTION}]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "thanks"},
    ]
    call, results, last = fold_tools(messages, "hermes")
    assert call["content"].startswith("Look.\n<tool_call>")
    assert results["role"] == "user" and results["content"].count("<tool_response>") == 2
    assert last == messages[-1]


@pytest.mark.parametrize("written", ["hermes", "llama3", "pythonic"])
def test_thoughts_without_an_end_call_nothing(written):
    call = write_calls([{"name": "f", "arguments": {"x": 1}}], written)
    parsed = parse_turn(f"<think>I might write\n{call}\nhere", written)
    assert not parsed.calls and not parsed.malformed and parsed.content == ""
    assert parsed.reasoning.startswith("I might write")


def test_an_answer_in_json_is_no_broken_call_of_llama3():
    answer = parse_turn('{"answer": 3}', "llama3")
    assert answer.content == '{"answer": 3}' and not answer.malformed and not answer.calls
    for broken in ('{"answer": 3', '<|python_tag|>{"answer": 3}', '{"name": 3}', '{"name": "f"} and'):
        assert parse_turn(broken, "llama3").malformed, broken
    assert parse_turn('{"name": "f"}', "llama3").calls == (ToolCall("f", {}),)
    assert parse_turn('{"name": "f", "type": "function"}', "llama3").calls == (ToolCall("f", {}),)
    odd = parse_turn('{"name": "f", "parameters": {"x": 1}, "reason": "why"}', "llama3")
    assert odd.calls == (ToolCall("f", {"x": 1}),)
    for misnamed in ("args", "params"):
        assert parse_turn(f'{{"name": "f", "{misnamed}": {{"x": 1}}}}', "llama3").malformed
    person = parse_turn('{"name": "Bob", "age": 3}', "llama3")
    assert person.content == '{"name": "Bob", "age": 3}' and not person.calls and not person.malformed


def test_a_list_within_a_line_of_words_is_no_pythonic_call():
    prose = 'Take the list [int(x="3")] as it is.'
    assert parse_turn(prose, "pythonic").content == prose and not parse_turn(prose, "pythonic").calls
    for text in ('[int(x="3")]', 'I call it:\n  [int(x="3")]'):
        assert parse_turn(text, "pythonic").calls == (ToolCall("int", {"x": "3"}),), text


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a": ', "}")])
def test_arguments_may_be_nested_but_not_without_end(begin, end):
    def parsed(depth):
        value = begin * depth + "1" + end * depth
        return parse_turn(f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>', "hermes")

    assert len(parsed(60).calls) == 1 and not parsed(60).malformed
    (why,) = parsed(70).malformed
    assert "nested over 64 deep" in why and not parsed(70).calls
