"""In which format a model is taken to write its tool calls: the one in which its template writes them."""

import pytest

from rl.envs.chat.template import ChatTemplate
from rl.envs.chat.tool_calls import ToolCall
from rl.errors import ConfigError
from tests.envs.chat.templates import OTHERS, make_tokenizer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
USER = {"role": "user", "content": "hi"}
CALL = {
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "the sky", "far": True, "n": 3}},
}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "call00000"}]}
PLAIN = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
READ = {
    "qwen2_5": ("hermes", "<|im_end|>"),
    "qwen3": ("hermes", "<|im_end|>"),
    "qwen3_instruct_2507": ("hermes", "<|im_end|>"),
    "qwen3_vl": ("hermes", "<|im_end|>"),
    "llama3_1": ("llama3", "<|eot_id|>"),
    "llama3_2": ("llama3", "<|eot_id|>"),
    "lfm2_2_5": ("pythonic", "<|im_end|>"),
    "lfm2_v2": ("pythonic", "<|im_end|>"),
}


@pytest.mark.parametrize("name", READ)
def test_a_call_is_read_as_the_template_writes_it(name, tmp_path):
    written, end = READ[name]
    tokenizer = make_tokenizer(name, tmp_path, end)
    template = ChatTemplate(tokenizer)
    assert template.written == written
    turns = tokenizer.decode_with_special(template.prompt([USER, CALLED, USER], [TOOL])).split(end)
    turn = [turn for turn in turns if "look" in turn][-1]  # the first is the system's, which describes it
    text = template.text(tokenizer.encode_plain(turn)).removeprefix("assistant")
    assert template.parse(text).calls == (ToolCall("look", CALL["function"]["arguments"]),)


@pytest.mark.parametrize("name", OTHERS)
def test_tools_are_refused_where_calls_could_not_be_read(name, tmp_path):
    why = "writes no calls" if name == "lfm2" else "writes tool calls in a format that is not read here"
    reason = rf"{why}.*; set env\.call_format to hermes"
    tokenizer = make_tokenizer(name, tmp_path, OTHERS[name])
    template = ChatTemplate(tokenizer)
    assert template.prompt([USER], [])
    with pytest.raises(ConfigError, match=reason):
        template.prompt([USER], [TOOL])
    described = ChatTemplate(tokenizer, "hermes")
    text = tokenizer.decode(described.prompt([USER], [TOOL]))
    # A template that writes no calls describes tools itself.
    assert "look" in text and ("<tool_call>" in text) == (name != "lfm2")
    assert described.parse(described.written_turn(CALLED)).calls[0].name == "look"


@pytest.mark.parametrize("name", ["get-sum", "a.b", "class", "1st"])
@pytest.mark.parametrize("of", ["tool", "parameter"])
def test_what_python_could_not_call_is_refused_where_calls_are_as_in_python(of, name, tmp_path):
    template = ChatTemplate(make_tokenizer("lfm2_2_5", tmp_path, "<|im_end|>"))
    names = (name, "x") if of == "tool" else ("f", name)
    parameters = {"type": "object", "properties": {names[1]: {"type": "string"}}}
    tool = {"type": "function", "function": {"name": names[0], "parameters": parameters}}
    with pytest.raises(ConfigError, match=r"written in a call as in Python.*env\.call_format to hermes"):
        template.prompt([USER], [tool])


def test_tags_that_a_vocabulary_calls_special_are_read(tmp_path):
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer = make_tokenizer("qwen3", tmp_path, tags=tags)
    template = ChatTemplate(tokenizer)
    thoughts = template.written_turn({**CALLED, "content": "<think>far\nup</think>"})
    tokens = tokenizer.encode_plain(thoughts + "<|im_end|>")
    ids = tokenizer.vocabulary
    assert {ids[tag] for tag in tags} < set(tokens)
    parsed = template.parse(template.text(tokens))
    assert parsed.reasoning == "far\nup"
    assert parsed.calls == (ToolCall("look", {"at": "the sky", "far": True, "n": 3}),)


def test_of_several_templates_by_name_the_one_for_tools_is_taken(tmp_path):
    tokenizer = make_tokenizer("qwen2_5", tmp_path, named={"default": PLAIN})
    template = ChatTemplate(tokenizer)
    assert template.written == "hermes"
    assert "look" in tokenizer.decode(template.prompt([USER], [TOOL]))
