"""ChatTemplate, with templates of the test's own: what they drop, refuse or cannot end."""

import json
import re

import pytest

from rl.envs.chat.template import ChatTemplate, for_template
from rl.errors import ConfigError

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
USER = {"role": "user", "content": "hi"}
END = "<end>"


class Letters:
    """A tokenizer of single letters, with one special token; `write` is its template."""

    eos_id = 0

    def __init__(self, write, chat_template="{{ messages }} {{ tools }}"):
        self.write, self.chat_template = write, chat_template

    def encode_plain(self, text):
        return [0 if part == END else ord(part) for part in re.findall(f"{END}|.", text, re.DOTALL)]

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens if token)

    def decode_with_special(self, tokens):
        return "".join(chr(token) if token else END for token in tokens)

    def render(self, messages, tools, add_generation_prompt):
        text = "".join(self.write(message) for message in messages)
        return f"{len(tools)} tools;" * bool(tools) + text + "A:" * add_generation_prompt


def plain(message):
    calls = "".join(f"[{json.dumps(call['function'])}]" for call in message.get("tool_calls", ()))
    return f"{message['role'][0].upper()}:{message['content']}{calls}{END}"


def results(num):
    return [
        {"role": "tool", "tool_call_id": f"c{i}", "name": "look", "content": f"seen {i}"} for i in range(num)
    ]


def after_a_turn(template, messages):
    return template._tokenizer.decode_with_special(template.continuation(messages, [TOOL]))


def test_what_follows_a_turn_is_written_after_the_token_that_ended_it():
    template = ChatTemplate(Letters(plain))
    assert template.end_id == 0
    assert after_a_turn(template, results(2)) == "T:seen 0<end>T:seen 1<end>A:"
    assert after_a_turn(template, [USER]) == "U:hi<end>A:"


@pytest.mark.parametrize("most", [0, 1])
def test_a_template_that_takes_few_calls_in_a_turn_is_tried_with_fewer(most):
    def write(message):
        if len(message.get("tool_calls", ())) > most:
            raise ValueError(f"at most {most} calls")
        return plain(message)

    template = ChatTemplate(Letters(write))
    assert after_a_turn(template, results(2)) == "T:seen 0<end>T:seen 1<end>A:"


def test_a_template_that_leaves_calls_out_is_tried_without():
    def write(message):
        return "A:(a call)<end>" if message.get("tool_calls") else plain(message)

    assert after_a_turn(ChatTemplate(Letters(write)), results(1)) == "T:seen 0<end>A:"


def test_a_template_that_does_not_end_a_turn_with_calls_is_tried_without():
    def write(message):
        text = plain(message)
        return text.removesuffix(END) if message.get("tool_calls") or message["role"] == "tool" else text

    assert after_a_turn(ChatTemplate(Letters(write)), results(1)) == "T:seen 0A:"


def test_a_template_that_takes_no_such_message_is_named():
    def write(message):
        if message["role"] == "tool":
            raise ValueError("no tools")
        return plain(message)

    template = ChatTemplate(Letters(write))
    with pytest.raises(ConfigError, match="does not take tool messages after an assistant's turn"):
        template.continuation(results(1), [TOOL])
    assert after_a_turn(template, [USER]) == "U:hi<end>A:"


@pytest.mark.parametrize(
    "write",
    [
        lambda message: f"{message['role']}: {message['content']}\n",  # no token of its own
        lambda message: f"{message['role']}: {message['content']}",  # nothing at all
        lambda message: f"{message['role']}: (something){END}",  # the turn is not there
    ],
)
def test_a_template_whose_turns_would_not_end_is_refused(write):
    with pytest.raises(ConfigError, match="does not end the assistant's turn with a special token"):
        ChatTemplate(Letters(write))


def test_no_template_is_refused():
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate(Letters(plain, chat_template=""))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("abc", "abc"),
        (None, ""),
        (7, "7"),
        ([], ""),
        ([{"type": "text", "text": "a"}, "b", {"type": "image_url"}, {"type": "text", "text": "c"}], "abc"),
    ],
)
def test_the_text_of_a_content(content, text):
    assert for_template({"role": "user", "content": content})["content"] == text


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ('{"at": 1}', {"at": 1}),
        ({"at": 1}, {"at": 1}),
        ("not JSON", {"arguments": "not JSON"}),
    ],
)
def test_the_arguments_of_a_call_are_an_object(arguments, made):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    (read,) = for_template({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"]
    assert read == {"id": "1", "type": "function", "function": {"name": "look", "arguments": made}}


def test_a_template_without_tools_is_told_of_them_in_the_first_system_message():
    template = ChatTemplate(Letters(plain, chat_template="{{ messages }}"))
    system = {"role": "system", "content": "Be brief."}

    def told(*messages):
        return template._tokenizer.decode_with_special(template.prompt_once(messages, [TOOL]))

    described = 'You can call these tools:\n{"type": "function"'
    assert told(USER).startswith(f"S:{described}") and told(USER).endswith("<end>U:hi<end>A:")
    assert told(system, USER).startswith(f"S:Be brief.\n\n{described}")
    assert told(system, USER).count("S:") == told(USER, system).count("You can call") == 1
    assert told(USER, system).startswith(f"S:{described}")
    assert told().startswith(f"S:{described}")
    assert template.prompt_once([USER], ()) == template._tokenizer.encode_plain("U:hi<end>A:")
