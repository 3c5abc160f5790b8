"""A record of a rollout is JSON, whatever an environment has put into it."""

# holds: exact

import json
import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.observability.plain import plain
from rl.observability.rollout_log import rollout_record
from rl.types import Problem, Rollout, Score, StopReason


class Unwritable:
    def __str__(self):
        raise ValueError("no")


CIRCLE: list = []
CIRCLE.append(CIRCLE)
ODD = st.sampled_from(
    [
        {1, 2},
        b"a",
        1j,
        ...,
        float("nan"),
        np.float32(0.5),
        np.arange(3),
        Unwritable(),
        CIRCLE,
        threading.Lock(),
    ]
)
KEYS = st.text(max_size=2) | st.integers() | st.tuples(st.integers()) | st.none()
VALUES = st.recursive(
    ODD | st.text() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(notes=st.dictionaries(KEYS, VALUES, max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_rollouts_record_is_json_whatever_its_notes_are(notes):
    messages = ({"role": "user", "content": b"x", "of": notes},)
    rollout = Rollout(Problem("1", "q"), (), "", StopReason.STOP, None, messages=messages)
    record = rollout_record(0, rollout, Score(1.0, notes=notes))
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_what_is_json_stays_as_it_is():
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": []}}
    assert plain(value) == value
    assert plain(2**20_000) == "<int>" and plain(CIRCLE) == plain(CIRCLE)
    assert plain([np.longdouble(0.5), np.clongdouble(1)]) == ["0.5", "(1+0j)"]
    assert plain({(1, 2): np.float32(0.5), "n": np.arange(2)}) == {"(1, 2)": 0.5, "n": [0, 1]}


def test_an_object_that_holds_itself_ends():
    of_itself: dict = {}
    of_itself["x"] = of_itself
    assert '{"x": "..."}' in json.dumps(plain(of_itself))
