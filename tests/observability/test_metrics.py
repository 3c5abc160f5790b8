"""Names that a user gives to parts of a reward stay apart from the metrics of a step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.observability.metrics import group_metrics
from tests.controller.test_training_batch import group

PLAIN = group_metrics([group(1, 0, 1)])
NAMES = sorted(
    {part for name in PLAIN for part in (name, *name.split("/"))} | {"timeout", "errors/timeout", "shaping"}
)


def with_parts(components):
    plain = group(1, 0, 1)
    return replace(plain, scores=tuple(replace(score, components=components) for score in plain.scores))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=4)), st.floats(-9, 9), max_size=5))
def test_a_part_replaces_no_metric_whatever_it_is_called(components):
    metrics = group_metrics([with_parts(components)])
    assert {name: metrics[name] for name in PLAIN} == PLAIN
    own = {name: value for name, value in metrics.items() if name not in PLAIN}
    assert own.keys() == {f"reward/part/{name}" for name in components}


@pytest.mark.parametrize("name", ["mean", "std", "errors", "answer"])
def test_a_part_is_a_metric(name):
    assert group_metrics([with_parts({name: 0.5})])[f"reward/part/{name}"] == 0.5
