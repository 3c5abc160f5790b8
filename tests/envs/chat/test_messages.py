"""Which messages of OpenAI's API are taken, from an agent, an environment or a data set."""

import pytest

from rl.envs.chat.messages import wrong_with

TEXT = {"type": "text", "text": "look"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("look", ""),
        (None, ""),
        ([], ""),
        ([TEXT, {"text": "around"}], ""),
        (
            [TEXT, {"type": "image_url", "image_url": {"url": "x"}}],
            "a part of type 'image_url' is not offered",
        ),
        ([{"type": "refusal", "text": "no"}], "a part of type 'refusal' is not offered"),
        ([{"type": "text"}], "a part of type 'text' is not offered"),
        (["look"], "a part of type 'look' is not offered"),
        (7, "a text, or a list of parts"),
    ],
)
def test_content_is_text_or_parts_of_text(content, words):
    wrong = wrong_with({"role": "user", "content": content})
    assert words in wrong and bool(words) == bool(wrong)


@pytest.mark.parametrize(
    ("calls", "is_taken"),
    [
        (None, True),
        ([], True),
        ([{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}], True),
        ([{"function": {"name": "look", "arguments": {"at": 1}}}], True),
        ([{"function": {"name": "look"}}], False),
        ([{"function": {"arguments": "{}"}}], False),
        ([{"name": "look", "arguments": "{}"}], False),
        ([{"function": {"name": "look", "arguments": "{}"}}, {"name": "look", "arguments": "{}"}], False),
        ("look", False),
    ],
)
def test_calls_have_a_name_and_arguments(calls, is_taken):
    assert (wrong_with({"role": "assistant", "content": "", "tool_calls": calls}) == "") == is_taken


@pytest.mark.parametrize("message", [None, "user", {}, {"content": "x"}, {"role": 1, "content": "x"}])
def test_a_message_has_a_role(message):
    wrong = "a message is an object with a role, as {'role': 'user', 'content': '...'}"
    assert wrong_with(message) == wrong
