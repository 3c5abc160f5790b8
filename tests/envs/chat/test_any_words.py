"""Whatever the policy writes: it is told, or scored, or its sample is dropped by the table; the run goes on."""

# holds: exact

import json
from dataclasses import dataclass
from keyword import kwlist

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.envs.chat.env import ChatEnv
from rl.envs.chat.loop import chat_template
from rl.envs.chat.tool_calls import as_message, parse_turn, write_calls
from rl.envs.chat.tools import tool
from rl.types import Problem
from tests.envs.chat.playing import play_here
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.words import ARGUMENTS, FORMATS, NO_JSON, Writer, check, turns, words


@given(data=st.data(), written=st.sampled_from(FORMATS))
@settings(max_examples=300, deadline=None)
def test_a_call_that_is_read_is_json_and_text(data, written):
    text = data.draw(words(written))
    parsed = parse_turn(text, written)
    message = as_message(parsed, text, "c")
    json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    for call in parsed.calls:
        assert json.loads(json.dumps(call.arguments)) == call.arguments


@given(
    calls=st.lists(st.tuples(st.sampled_from(["echo", "add"]), ARGUMENTS), min_size=1, max_size=3),
    written=st.sampled_from(FORMATS),
    content=st.sampled_from(["", "First.", "so {", "So:\n- a\n- b"]),
)
@settings(max_examples=150, deadline=None)
def test_what_is_written_is_read_again_whatever_the_values(calls, written, content):
    """Also after words, as `fold_tools` shows a turn to a template that knows no tools."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls if sound(arguments)]
    if written == "pythonic":
        functions = [f for f in functions if all(name.isidentifier() for name in f["arguments"])]
        if not all(name not in kwlist for f in functions for name in f["arguments"]):
            return
    parsed = parse_turn("\n".join(filter(None, [content, write_calls(functions, written)])), written)
    assert not parsed.malformed and parsed.content == content
    assert [(call.name, call.arguments) for call in parsed.calls] == [
        (f["name"], f["arguments"]) for f in functions
    ]


def sound(value):
    """JSON that is text: neither NaN nor half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Echo(ChatEnv):
    """Tools, a user, and a reward that repeat the policy's words in whatever form they have."""

    num_eval: int = 2
    max_turns: int = 3

    def generate(self, seed):
        return Problem(str(seed), "go on")

    @tool
    def echo(self, text: object) -> object:
        """Repeat it."""
        return text

    @tool
    def add(self, a: int, b: int) -> int:
        """a plus b."""
        return a + b

    def step(self, episode):
        return json.loads(episode.response)  # raises, or returns what it must not, or goes on

    def reward_episode(self, episode):
        return {"length": len(episode.response), "inverse": 1 / len(episode.response)}


SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        name: make_tokenizer(name, tmp_path_factory.mktemp(name))
        for name in ("qwen2_5", "llama3_1", "gemma3")
    }


@pytest.mark.parametrize("written", FORMATS)
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3"])
@given(data=st.data())
@SETTINGS
def test_whole_episodes_of_any_words(tokenizers, name, written, data):
    tokenizer, env = tokenizers[name], Echo(call_format=written)
    policy = Writer(tokenizer, chat_template(tokenizer, written).end_id, data.draw(turns(written)))
    (rollout,) = play_here(env, tokenizer, policy, Problem("1", "go on"))
    check(rollout)


@pytest.mark.parametrize("written", FORMATS)
def test_calls_with_what_json_has_not_are_told_or_scored(tokenizers, written):
    end = chat_template(tokenizers["qwen2_5"], written).end_id
    for text in NO_JSON[written]:
        policy = Writer(tokenizers["qwen2_5"], end, [(text, False)] * 2)
        (rollout,) = play_here(
            Echo(call_format=written), tokenizers["qwen2_5"], policy, Problem("1", "go on")
        )
        check(rollout)
