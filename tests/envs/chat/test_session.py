"""What is trained on is what was sampled, token for token, whatever the template and the words."""

import asyncio
import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.batching import segments_sample
from rl.controller.member import scatter_reward
from rl.envs.chat.session import ChatSession, TooLong, Turn
from rl.envs.chat.template import ChatTemplate
from rl.envs.chat.tool_calls import ParsedTurn
from rl.models.tokenizer import HFTokenizer
from rl.types import Completion, Problem, Rewards, Rollout, SamplingParams, Score, StopReason, VersionRange
from tests.envs.chat.templates import NAMES, make_tokenizer

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
_PLACE = {}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    _PLACE["path"] = tmp_path_factory.mktemp("templates")


@lru_cache
def tokenizer_of(name: str) -> HFTokenizer:
    path: Path = _PLACE["path"]
    return make_tokenizer(name, path / name)


class Writer:
    """Samples the tokens of given texts, in ways in which the tokenizer would not write them."""

    def __init__(self, tokenizer, end, texts, rng):
        self.tokenizer, self.end, self.texts, self.rng = tokenizer, end, list(texts), rng
        self.asked = []

    async def sample(self, prompt, n, params):
        assert n == 1 and self.end in params.stop_token_ids
        pieces, text = [], self.texts.pop(0)
        while text:  # in pieces of random length: tokens that never merge
            size = self.rng.randint(1, 3)
            pieces += self.tokenizer.encode_plain(text[:size])
            text = text[size:]
        tokens = [*pieces, self.end]
        self.asked.append((list(prompt), params, tokens))
        logprobs = [-0.5 - i for i in range(len(tokens))]
        return [Completion(tokens, logprobs, VersionRange(0, 0), StopReason.STOP)]


def session_of(name, texts, rng=None, **settings_):
    tokenizer = tokenizer_of(name)
    template = ChatTemplate(tokenizer)
    writer = Writer(tokenizer, template.end_id, texts, rng or random.Random(0))
    session = ChatSession(template, writer, SamplingParams(64), range(100, 200), 10_000, **settings_)
    return session, writer, tokenizer


words = st.text(st.sampled_from("the in 1234ab\n.,é{}"), min_size=1, max_size=12).filter(
    lambda t: t == t.strip()
)
exchange = st.tuples(words, st.sampled_from(["user", "tool"]), words)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(first=words, turns=st.lists(exchange, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_a_conversation_only_ever_grows_and_keeps_the_sampled_tokens(name, first, turns, seed):
    session, writer, tokenizer = session_of(name, [said for said, _, _ in turns], random.Random(seed))
    messages = [{"role": "user", "content": first}]
    for _, role, answer in turns:
        turn = asyncio.run(session.complete(messages, ()))
        messages += [turn.message, {"role": role if name != "gemma3" else "user", "content": answer}]
    before = []
    for prompt, _, tokens in writer.asked:
        assert prompt[: len(before)] == before
        before = [*prompt, *tokens]
    assert [params.seed for _, params, _ in writer.asked] == [100 + i for i in range(len(turns))]
    (branch,) = session.branches
    sample = segments_sample(branch)
    assert sample.tokens.tolist() == before
    assert sample.tokens[sample.loss_mask].tolist() == [t for _, _, made in writer.asked for t in made]
    if name != "qwen3" and all(role == "user" for _, role, _ in turns):
        # The template, given the whole conversation, writes the same text; though its tokens may be others.
        whole = tokenizer.render(messages[:-1], (), False)
        assert whole.startswith(tokenizer.decode_with_special(before))


def test_the_same_text_would_have_been_other_tokens():
    """The check above can fail: tokenising the text again gives other tokens."""
    session, writer, tokenizer = session_of("llama3", ["the in 1234"], random.Random(1))
    asyncio.run(session.complete([{"role": "user", "content": "x"}], ()))
    sampled = writer.asked[0][2][:-1]
    assert tokenizer.decode(sampled) == "the in 1234"
    assert tokenizer.encode_plain("the in 1234") != sampled


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1"])
def test_calls_and_results_follow_the_models_own_format(name):
    call = {
        "qwen": '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>',
        "llam": '{"name": "look", "parameters": {"at": "x"}}',
    }[name[:4]]
    session, writer, tokenizer = session_of(name, [call, "done"])
    messages = [{"role": "user", "content": "hi"}]
    turn = asyncio.run(session.complete(messages, [TOOL]))
    (made,) = turn.message["tool_calls"]
    assert made["function"] == {"name": "look", "arguments": '{"at": "x"}'}
    messages += [turn.message, {"role": "tool", "tool_call_id": made["id"], "content": "seen"}]
    asyncio.run(session.complete(messages, [TOOL]))
    assert '"look"' in tokenizer.decode(writer.asked[0][0])
    after = tokenizer.decode_with_special(writer.asked[1][0][len(writer.asked[0][0]) :])
    assert call in after and "seen" in after
    whole = tokenizer.render([{**m, "content": m.get("content") or ""} for m in messages[:1]], [TOOL], True)
    assert tokenizer.decode_with_special(writer.asked[0][0]) == whole


def test_old_thinking_stays_where_it_was_sampled():
    session, writer, tokenizer = session_of("qwen3", ["<think>hm</think>\n\nfour", "five"])
    messages = [{"role": "user", "content": "2 + 2"}]
    turn = asyncio.run(session.complete(messages, ()))
    assert turn.message["content"] == "four" and turn.message["reasoning_content"] == "hm"
    messages += [{"role": "assistant", "content": "four"}, {"role": "user", "content": "and 1"}]
    asyncio.run(session.complete(messages, ()))  # the client has dropped the thinking, as they do
    assert "hm" in tokenizer.decode(writer.asked[1][0]) and len(session.branches) == 1


def test_a_rewritten_history_forks_and_shared_turns_are_learned_once():
    session, writer, _ = session_of("llama3", ["one", "two", "three"])
    messages = [{"role": "user", "content": "a"}]
    first = asyncio.run(session.complete(messages, ()))
    messages.append(first.message)
    asyncio.run(session.complete([*messages, {"role": "user", "content": "b"}], ()))
    asyncio.run(session.complete([*messages, {"role": "user", "content": "c"}], ()))
    samples = [segments_sample(branch) for branch in session.branches]
    learned = [sample.tokens[sample.loss_mask].tolist() for sample in samples]
    sampled = [made for _, _, made in writer.asked]
    assert learned == [[*sampled[0], *sampled[1]], sampled[2]]
    assert (
        samples[1].tokens.tolist()[: len(sampled[0])] != []
        and first.tokens == samples[1].tokens.tolist()[: len(first.tokens)]
    )
    in_branches = [s.tokens.tolist() for branch in session.branches for s in branch if s.sampled]
    assert (
        session.turn_order == ()
        and [turn.completion.tokens.tolist() for turn in session.turns] == in_branches
    )
    rewritten = [{"role": "user", "content": "summary"}, {"role": "user", "content": "d"}]
    writer.texts.append("four")
    asyncio.run(session.complete(rewritten, ()))
    assert len(session.branches) == 3


def test_each_turn_gets_its_own_reward_though_branches_have_them_in_another_order():
    """A sub-agent is asked between two turns of the agent, which reward_episode sees in that order."""
    session, _, _ = session_of("llama3", ["agent 1", "sub-agent, longer", "agent 2"])
    messages = [{"role": "user", "content": "a"}]
    first = asyncio.run(session.complete(messages, ()))
    asyncio.run(session.complete([{"role": "user", "content": "sub"}], ()))
    asyncio.run(session.complete([*messages, first.message, {"role": "user", "content": "b"}], ()))
    lengths = [len(turn.completion.tokens) for turn in session.turns]
    by_tokens = Rewards(tokens=tuple(float(i) for i, length in enumerate(lengths) for _ in range(length)))
    branches = session.branches
    rollout = Rollout(
        Problem("1"),
        branches[0],
        "",
        StopReason.STOP,
        None,
        forks=branches[1:],
        turn_order=session.turn_order,
    )
    assert rollout.turn_order == (1, 0, 2) and by_branches(session) == [
        "sub-agent, longer",
        "agent 1",
        "agent 2",
    ]
    for parts in (Rewards(turns=(0.0, 1.0, 2.0)), by_tokens):
        rewards = scatter_reward(rollout, Score(3.0, parts=parts))
        of_turns = [part.max() for part in np.split(rewards, np.cumsum(rollout.turn_lengths)[:-1])]
        assert of_turns == [1.0, 0.0, 2.0]


def by_branches(session):
    """The texts of all turns, in the order in which branches have them."""
    order = session.turn_order or range(len(session.turns))
    return [session.turns[i].text for i in np.argsort(order)]


def test_a_prompt_that_siblings_share_is_tokenised_once(monkeypatch):
    tokenizer = tokenizer_of("llama3")
    template = ChatTemplate(tokenizer)
    encode, texts = tokenizer.encode_plain, []
    monkeypatch.setattr(tokenizer, "encode_plain", lambda text: texts.append(text) or encode(text))
    messages = [{"role": "user", "content": "a"}]
    first, again = (template.prompt(messages, ()) for _ in range(2))
    first.append(0)  # a list of its own
    assert again == template.prompt(messages, ()) != first and len(texts) == 1
    assert template.prompt([{"role": "user", "content": "b"}], ()) != again


def test_a_rollouts_versions_are_those_of_all_its_turns():
    session, _, _ = session_of("llama3", [])
    assert session.versions is None
    for oldest, newest in ((5, 5), (3, 6), (4, 9)):
        completion = Completion([1], [0.0], VersionRange(oldest, newest), StopReason.STOP)
        session.turns.append(Turn(None, np.array([7], np.int32), completion, {}, ParsedTurn(""), ""))
    assert session.versions == VersionRange(3, 9)


def test_a_call_that_cannot_be_read_stays_in_the_turns_words():
    """The policy sees what it wrote, and is told why it could not be read."""
    text = 'Look: <tool_call>{"name": </tool_call>'
    session, _, _ = session_of("qwen3", [text])
    turn = asyncio.run(session.complete([{"role": "user", "content": "hi"}], [TOOL]))
    assert turn.message == {"role": "assistant", "content": text} and len(turn.parsed.malformed) == 1


def test_a_turn_ends_at_the_templates_token_beside_those_that_were_asked_for():
    tokenizer = tokenizer_of("llama3")
    template = ChatTemplate(tokenizer)
    for own in ((), (7,), (template.end_id,), (7, template.end_id)):
        writer = Writer(tokenizer, template.end_id, ["ok"], random.Random(0))
        session = ChatSession(template, writer, SamplingParams(64, stop_token_ids=own), [0], 10_000)
        asyncio.run(session.complete([{"role": "user", "content": "a"}], ()))
        assert sorted(writer.asked[0][1].stop_token_ids) == sorted({*own, template.end_id})


def test_no_room_is_said_and_a_turn_gets_no_more_than_there_is():
    tokenizer = tokenizer_of("llama3")
    template = ChatTemplate(tokenizer)
    length = len(template.prompt([{"role": "user", "content": "a"}], ()))
    writer = Writer(tokenizer, template.end_id, ["ok"], random.Random(0))
    session = ChatSession(template, writer, SamplingParams(64), [0, 1], length + 7)
    asyncio.run(session.complete([{"role": "user", "content": "a"}], ()))
    assert writer.asked[0][1].max_new_tokens == 7
    with pytest.raises(TooLong, match="leaves no room"):
        asyncio.run(session.complete([{"role": "user", "content": "a" * 30}], ()))


def test_a_turn_that_nobody_got_is_not_learned_from():
    session, _, _ = session_of("llama3", ["one", "two"])
    messages = [{"role": "user", "content": "a"}]
    session.forget(asyncio.run(session.complete(messages, ())))
    asyncio.run(session.complete(messages, ()))
    (branch,) = session.branches
    assert len(session.turns) == 1 and sum(segment.sampled for segment in branch) == 1


@pytest.mark.slow
def test_smollm2s_own_tokenizer_and_template(monkeypatch):
    """As above, with its real vocabulary: the model directory that `rl fetch smollm2` makes."""
    tokenizer = HFTokenizer(Path(__file__).parents[3] / "models" / "smollm2-135m-instruct")
    template = ChatTemplate(tokenizer)
    rng = random.Random(0)
    pieces = ["the", " in", " 12", "34", "\n", "é", "{", "}", "abc", ". "]
    for seed in range(30):
        said = ["".join(rng.choices(pieces, k=rng.randint(1, 8))).strip() or "x" for _ in range(4)]
        writer = Writer(tokenizer, template.end_id, said, random.Random(seed))
        session = ChatSession(template, writer, SamplingParams(64), range(9), 10_000)
        messages = [{"role": "user", "content": "hello"}]
        for text in said:
            turn = asyncio.run(session.complete(messages, [TOOL]))
            assert turn.text == text
            messages += [
                turn.message,
                {"role": "tool", "tool_call_id": "1", "name": "look", "content": "seen"},
            ]
        (branch,) = session.branches
        sample = segments_sample(branch)
        assert sample.tokens.tolist() == [*writer.asked[-1][0], *writer.asked[-1][2]]
        assert sample.tokens[sample.loss_mask].tolist() == [t for _, _, made in writer.asked for t in made]
        assert '"look"' in tokenizer.decode(writer.asked[0][0])  # told in words: the template knows no tools


def test_a_conversation_may_have_as_many_turns_as_an_episode():
    turn = None
    for i in range(2000):  # over Python's limit of calls within each other
        completion = Completion([i], [0.0], VersionRange(0, 0), StopReason.STOP)
        message = {"role": "assistant", "content": ""}
        turn = Turn(turn, np.array([7], np.int32), completion, message, ParsedTurn(""), "")
    assert turn.tokens == [token for i in range(2000) for token in (7, i)]
    session, _, _ = session_of("llama3", [])
    session.turns = turn.path
    (branch,) = session.branches
    assert sum(len(segment.tokens) for segment in branch if segment.sampled) == 2000


def test_nothing_goes_on_after_a_turn_that_was_cut_off():
    """It has no end: what follows begins a sequence of its own."""
    tokenizer = tokenizer_of("llama3")
    template = ChatTemplate(tokenizer)

    class CutOff(Writer):
        async def sample(self, prompt, n, params):
            (made,) = await super().sample(prompt, n, params)
            tokens, logprobs = made.tokens[:-1], made.logprobs[:-1]
            return [replace(made, tokens=tokens, logprobs=logprobs, stop=StopReason.LENGTH)]

    writer = CutOff(tokenizer, template.end_id, ["one", "two"], random.Random(0))
    session = ChatSession(template, writer, SamplingParams(64), range(2), 10_000)
    messages = [{"role": "user", "content": "a"}]
    first = asyncio.run(session.complete(messages, ()))
    messages += [first.message, {"role": "user", "content": "b"}]
    asyncio.run(session.complete(messages, ()))
    assert writer.asked[1][0] == template.prompt(messages, ()) and len(session.branches) == 2


def test_a_client_may_send_a_calls_arguments_back_in_another_order():
    call = '<tool_call>\n{"name": "look", "arguments": {"b": 1, "a": 2}}\n</tool_call>'
    session, writer, _ = session_of("qwen2_5", [call, "done"])
    messages = [{"role": "user", "content": "hi"}]
    turn = asyncio.run(session.complete(messages, [TOOL]))
    (made,) = turn.message["tool_calls"]
    sent = {**made, "function": {"name": "look", "arguments": '{"a": 2, "b": 1}'}}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [sent]},
        {"role": "tool", "tool_call_id": made["id"], "content": "seen"},
    ]
    asyncio.run(session.complete(messages, [TOOL]))
    before = [*writer.asked[0][0], *writer.asked[0][2]]
    assert writer.asked[1][0][: len(before)] == before and len(session.branches) == 1
