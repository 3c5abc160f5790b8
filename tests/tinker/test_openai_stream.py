"""Streams are what the whole answer is: the same tokens, the same text, in parts that are final."""

# holds: exact

import asyncio
from itertools import chain, groupby
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from rl.envs.chat.tool_calls import parse_turn
from rl.tinker.openai import _Sampler
from rl.tinker.openai_chat import Deltas, Turn
from rl.tinker.openai_requests import CompletionsRequest
from rl.tinker.openai_stream import PartialText, interleaved, pieces
from rl.types import Completion, StopReason, VersionRange


def decode(tokens):
    """A token is a byte; 256 and over are special."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


SPECIAL = {256: "<|e|>", 257: "<|user|>"}


def spans(tokens):
    """(characters, whether they are a special token's), in order."""
    parts = []
    for is_special, group in groupby(tokens, lambda token: token in SPECIAL):
        run = list(group)
        parts += [(SPECIAL[token], True) for token in run] if is_special else [(decode(run), False)]
    return parts


def decode_with_special(tokens):
    return "".join(text for text, _ in spans(tokens))


def cut(tokens, stops):
    """The characters before the first stop string that belong to no special token."""
    characters = [(char, is_special) for text, is_special in spans(tokens) for char in text]
    text = "".join(char for char, _ in characters)
    end = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    return "".join(char for char, is_special in characters[:end] if not is_special)


def scripted(script, ends_itself):
    """Samples what the script goes on with; the logprob of a token is minus its place."""

    async def sample(prompt, size, number):
        start = len(prompt) - 1
        tokens = script[start : start + size]
        at_end = ends_itself and start + len(tokens) >= len(script)
        logprobs = [-float(start + i) for i in range(len(tokens))]
        stop = StopReason.STOP if at_end else StopReason.LENGTH
        likeliest = tuple(((token, -1.0),) for token in tokens)
        return Completion(tokens, logprobs, VersionRange(0, 0), stop, likeliest=likeliest)

    return sample


def streamed(script, max_tokens, stops, slice_tokens, ends_itself=True):
    async def read():
        sample, text = scripted(script, ends_itself), PartialText(decode, decode_with_special, stops)
        return [piece async for piece in pieces(sample, [0], max_tokens, text, slice_tokens)]

    return asyncio.run(read())


WORDS = ["a", "b", "aab", "é", "漢", "👍🏽", "\n", "<e", "nd>", "\ufffd"]
SCRIPTS = st.lists(st.sampled_from([*(list(word.encode()) for word in WORDS), [257]]), max_size=12)
STOPS = ["ab", "aaab", "é漢", "<end>", "\n\n", "b", "<|user|>", "a<|us", "r|>\n", "<|e|>"]


@settings(max_examples=150, deadline=None)
@given(SCRIPTS, st.lists(st.sampled_from(STOPS), max_size=3), st.data())
def test_a_stream_is_the_whole_answer(words, stops, data):
    script = [*chain(*words), 256]
    max_tokens = data.draw(st.integers(1, len(script) + 2))
    parts = streamed(script, max_tokens, stops, data.draw(st.integers(1, 9)))
    # The whole answer, as a generator ends it: at the first token whose text has a stop string.
    whole = script[:max_tokens]
    ends = (
        n for n in range(1, len(whole) + 1) if any(stop in decode_with_special(whole[:n]) for stop in stops)
    )
    at_stop = next(ends, None)
    whole = whole[:at_stop]
    assert [token for part in parts for token in part.completion.tokens.tolist()] == whole
    assert "".join(part.text for part in parts) == cut(whole, stops)
    assert [-x for part in parts for x in part.completion.logprobs.tolist()] == list(range(len(whole)))
    assert [t for part in parts for ((t, _),) in part.completion.likeliest] == whole
    ended = StopReason.STOP if at_stop or whole == script else StopReason.LENGTH
    assert [part.end for part in parts] == [None] * (len(parts) - 1) + [ended]
    for part in parts[:-1]:
        assert part.text.encode().decode() == part.text and len(part.completion.tokens)


def test_parts_are_sent_as_soon_as_they_are_final():
    parts = streamed(list("Hello, wörld <e".encode()), 16, ["<end>"], 4)
    assert [part.text for part in parts] == ["Hell", "o, w", "örl", "d <e"]
    held = streamed(list(b"abcabdabc"), 9, ["abcabe"], 3)
    assert [part.text for part in held] == ["abcabd", "abc"]


def test_a_stream_that_ends_early_ends_what_it_reads():
    ended = []

    async def stream(name, error=None):
        try:
            while True:
                if error:
                    raise error
                yield name
                await asyncio.sleep(0)
        finally:
            ended.append(name)

    async def first_of(*streams):
        merged = interleaved(streams)
        try:
            return await anext(merged)
        finally:
            await merged.aclose()

    assert asyncio.run(first_of(stream("a"), stream("b")))[1] in ("a", "b")
    assert sorted(ended) == ["a", "b"]
    ended.clear()
    try:
        asyncio.run(first_of(stream("a", ValueError("no")), stream("b")))
    except ValueError as error:
        assert str(error) == "no"
    else:
        raise AssertionError("the error of a stream is lost")
    assert "a" in ended


CALL = '{"name": "f", "arguments": {"x": 1}}'
FRAGMENTS = [
    "a",
    " ",
    "\n",
    "<",
    "<t",
    CALL,
    "<tool_call>",
    "</tool_call>",
    f"<tool_call>{CALL}</tool_call>",
    "{",
    "[f(x=1)]",
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["hermes", "llama3", "pythonic"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join),
    st.sampled_from([None, "", "Hm. ", "<tool_call>"]),
    st.booleans(),
    st.sampled_from(StopReason),
    st.data(),
)
def test_the_deltas_of_a_turn_are_its_message(written, text, thought, thinks, stop, data):
    """However its text is split, and whatever it calls, thinks, or fails to write.

    thinks: the prompt has opened the thoughts, which then have an end.
    """
    if thinks:
        text = f"{thought or ''}</think>\n{text}"
    elif thought is not None:
        text = f"<think>\n{thought}</think>\n{text}"
    turn = Turn([None], "", lambda whole: parse_turn(whole, written), written)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    deltas, sent, calls = Deltas(turn, thinks), {"reasoning_content": "", "content": ""}, []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        delta, reason = deltas.next(text[start:end], None)
        assert reason is None and "tool_calls" not in delta
        sent = {name: value + delta.get(name, "") for name, value in sent.items()}
    delta, reason = deltas.next("", stop)
    sent = {name: value + delta.get(name, "") for name, value in sent.items()}
    calls = [call["function"] for call in delta.get("tool_calls", ())]
    message, whole_reason = turn.message(text, stop)
    assert reason == whole_reason
    assert calls == [call["function"] for call in message.get("tool_calls", ())]
    if turn.read(text, stop) is not None:
        assert sent["content"] == message["content"]
        assert sent["reasoning_content"] == message.get("reasoning_content", "")
    else:  # plain text: nothing of it is lost
        said = sent["reasoning_content"] + sent["content"]
        marks = ("<think>", "</think>", " ", "\n")
        assert without(said, marks) == without(text, marks)


def without(text, marks):
    for mark in marks:
        text = text.replace(mark, "")
    return text


def sent_of(texts, thinks):
    deltas = Deltas(Turn([None], "", lambda whole: parse_turn(whole, "hermes"), "hermes"), thinks)
    sent = {"reasoning_content": "", "content": ""}
    for text, end in zip(texts, [*[None] * (len(texts) - 1), StopReason.STOP], strict=True):
        delta, _ = deltas.next(text, end)
        sent = {name: value + delta.get(name, "") for name, value in sent.items()}
    return sent


def test_thoughts_that_the_prompt_opened_are_no_content():
    texts = ["Okay, the user asks ", "for 2+2.\n</think>\n\n", "The answer", " is 4."]
    assert sent_of(texts, thinks=True) == {
        "reasoning_content": "Okay, the user asks for 2+2.",
        "content": "The answer is 4.",
    }


def test_the_answer_comes_whatever_was_sent_before_the_thoughts():
    assert sent_of(["Plan: ", "<think>a</think>", "b"], thinks=False)["content"].endswith("b")


def test_all_slices_of_a_stream_are_of_one_checkpoint():
    """Also where it is saved anew under its name meanwhile."""
    directories = iter(["first", "second"])

    asked = []

    class Sampling:
        async def sample(self, tenant, directory, body):
            asked.append((tenant, directory))
            return [Completion([7] * 16, [-1.0] * 16, VersionRange(0, 0), StopReason.LENGTH)]

    service = SimpleNamespace(
        sampling=Sampling(),
        sampled_directory=lambda tenant, model: next(directories),
        backend=SimpleNamespace(context_length=49),
    )
    tokenizer = SimpleNamespace(decode=decode, decode_with_special=decode_with_special)
    body = CompletionsRequest(model="tinker://a/weights/x", prompt="", max_tokens=48)
    sampler = _Sampler(service, tokenizer, "me", body, 0)

    async def read():
        (stream,) = sampler.streams([[1]])
        return [piece async for piece in stream]

    assert asyncio.run(read())[-1].end is StopReason.LENGTH
    assert asked == [("me", "first")] * 3
