"""What a policy may write: random tokens, JSON and Python, bare and as calls in every format."""

import json
import pickle

import numpy as np
from hypothesis import strategies as st

from rl.causes import CAUSES
from rl.observability.rollout_log import rollout_record
from rl.types import Completion, Rollout, StopReason, VersionRange

SURROGATES = st.sampled_from(["\ud800", "a\udfffb"])
NAMES = st.sampled_from(["echo", "add", "nothing", ""]) | st.text(max_size=4) | SURROGATES
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | SURROGATES
    | st.sampled_from(["</tool_call>", "</think>", "<tool_call>", '}; {"', ")]", "<|im_end|>"])
)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["text", "a", "b"]) | st.text(max_size=3), VALUES, max_size=3)
_ODD_JSON = ["[" * 3000, "{" * 3000, '{"a":' * 500 + "1" + "}" * 500, "1" * 5000, "1e999", "NaN", '"\\ud800"']
_ODD_PYTHON = [
    "{1}", "b'a'", "...", "1j", "{(1, 2): 3}", "{[1]: 2}", "{1: 2}", "set()", "1e999", "0x" + "f" * 5000, "'\\ud800'",
    "-" * 3000 + "1", "(" * 300 + ")" * 300, "open('x')", "*a", "**a", "f'{a}'", "'\\x00'", "x := 1", "(1, 2)",
]  # fmt: skip

JSON_TEXTS = (VALUES | ARGUMENTS).map(json.dumps) | st.sampled_from(_ODD_JSON)
PYTHON_TEXTS = (VALUES | ARGUMENTS).map(repr) | st.sampled_from(_ODD_PYTHON)
_CALL_BODIES = st.one_of(
    st.builds(lambda n, a: json.dumps({"name": n, "arguments": a}), NAMES, VALUES | ARGUMENTS),
    st.builds(lambda n, a: json.dumps({"name": n, "parameters": a}), NAMES, ARGUMENTS),
    st.builds(lambda a: f'{{"name": "echo", "arguments": {{"text": {a}}}}}', JSON_TEXTS),
    JSON_TEXTS,
)
_HERMES = _CALL_BODIES.map(lambda body: f"<tool_call>{body}</tool_call>")
_LLAMA3 = st.lists(_CALL_BODIES, min_size=1, max_size=2).map("; ".join)
_PYTHONIC = st.builds(
    lambda name, values: f"[{name}({', '.join(f'{n}={v}' for n, v in values)})]",
    st.sampled_from(["echo", "add", "nothing"]),
    st.lists(st.tuples(st.sampled_from(["text", "a", "b"]), PYTHON_TEXTS), max_size=2),
)
_NAMED = '{{"name": {}, "{}": {}}}'.format
NO_JSON = {
    "hermes": [
        f"<tool_call>{body}</tool_call>"
        for body in (
            _NAMED('"\\ud800"', "arguments", "{}"),
            _NAMED('"echo"', "arguments", '{"text": "\\udfff"}'),
            _NAMED('"echo"', "arguments", '{"text": NaN}'),
            _NAMED('"echo"', "arguments", '{"text": 1e999}'),
            _NAMED('["echo"]', "arguments", "{}"),
            _NAMED('"echo"', "arguments", "[1]"),
            "[1]",
        )
    ],
    "llama3": [
        _NAMED('"\\ud800"', "parameters", "{}"),
        _NAMED('"echo"', "parameters", '{"text": "\\udfff"}'),
        _NAMED('"echo"', "parameters", '{"text": -Infinity}'),
        _NAMED("3", "parameters", "{}"),
        _NAMED('"echo"', "parameters", "null"),
    ],
    "pythonic": [
        f"[echo(text={value})]"
        for value in ("{1}", "b'a'", "...", "1j", "{(1, 2): 3}", "{[1]: 2}", "{1: 2}", "'\\ud800'", "1e999")
    ],
}
"""Calls, each with one thing in it that JSON has not, or that is no text."""
FORMATS = tuple(NO_JSON)

_NOISE = st.text(max_size=12) | st.binary(max_size=12).map(lambda data: data.decode(errors="replace"))
_CALLS = {"hermes": _HERMES, "llama3": _LLAMA3, "pythonic": _PYTHONIC}
_AROUND = st.just("") | _NOISE | st.sampled_from(["<think>", "hm</think>", "[echo("])


def words(written: str) -> st.SearchStrategy[str]:
    """Mostly calls in this format. Without lone surrogates of their own: what a tokenizer decodes has none."""
    others = _HERMES | _LLAMA3 | _PYTHONIC | JSON_TEXTS | PYTHON_TEXTS | _NOISE
    text = _CALLS[written] | st.builds(
        lambda *parts: "".join(parts), _AROUND, _CALLS[written] | others, _AROUND
    )
    return text.map(lambda text: text.encode(errors="replace").decode())


class Writer:
    """A policy that samples these turns, (what, whether it is cut off); bytes are random tokens."""

    def __init__(self, tokenizer, end, turns):
        self._tokenizer, self._end, self._turns = tokenizer, end, list(turns)

    async def sample(self, prompt, n, params):
        text, is_cut = self._turns.pop(0) if self._turns else ("done", False)
        if isinstance(text, bytes):
            size = len(self._tokenizer.vocabulary)
            tokens = [token for byte in text if (token := byte * 7 % size) != self._end]
        else:
            tokens = self._tokenizer.encode_plain(text)
        tokens = [*tokens, *([] if is_cut else [self._end])] or [0]
        stop = StopReason.LENGTH if is_cut else StopReason.STOP
        return [Completion(tokens, np.zeros(len(tokens)), VersionRange(0, 0), stop)]


def turns(written: str) -> st.SearchStrategy[list[tuple[str | bytes, bool]]]:
    """For a Writer."""
    what = words(written) | words(written) | st.binary(max_size=30)
    return st.lists(st.tuples(what, st.sampled_from([False, False, False, True])), min_size=1, max_size=3)


def check(rollout: Rollout) -> None:
    """It ended by the table of causes, and can be recorded, sent and learned from."""
    score = rollout.score
    assert score is not None and np.isfinite(score.reward)
    assert score.cause in {"", *CAUSES} and bool(score.cause) == (score.error is not None)
    assert not score.is_dropped and rollout.turn_lengths, score  # no fault of the infrastructure's
    json.dumps(rollout_record(0, rollout, score), ensure_ascii=False).encode()
    assert pickle.loads(pickle.dumps(rollout)).response == rollout.response
