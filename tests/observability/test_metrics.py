"""The numbers of a step, worked by hand; names that a user gives to parts of a reward stay apart from them."""

# holds: exact

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.observability.metrics import (
    critic_metrics,
    eval_metrics,
    group_metrics,
    learning_metrics,
    offpolicy_metrics,
)
from rl.types import Problem, Rollout, Score, Segment, StopReason, VersionRange
from tests.controller.test_training_batch import group

PLAIN = group_metrics([group(1, 0, 1)])
NAMES = sorted(
    {part for name in PLAIN for part in (name, *name.split("/"))} | {"timeout", "errors/timeout", "shaping"}
)


def with_parts(components):
    plain = group(1, 0, 1)
    return replace(plain, scores=tuple(replace(score, components=components) for score in plain.scores))


def test_parts_add_up_to_the_mean_where_the_policy_failed_some():
    """Its own failure is a reward of 0; what the infrastructure lost is in neither."""
    good = Score(1.0, components={"answer": 0.8, "format": 0.2})
    lost = Score(0.0, "the judge is down", cause="server")
    of_one = group(good, Score(0.0, "ZeroDivisionError", cause="raised"), lost)
    assert [score.is_dropped for score in of_one.scores] == [False, False, True]
    metrics = group_metrics([of_one])
    assert metrics["reward/part/answer"] == 0.4 and metrics["reward/part/format"] == 0.1
    assert metrics["reward/mean"] == 0.5


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


def test_rewards_are_those_of_the_samples_that_were_kept():
    """What the policy brought about counts as its score; what an absent judge did counts for nobody."""
    dropped, policys = Score(9.0, "no answer", cause="judge"), Score(0.0, "no integer", cause="raised")
    metrics = group_metrics([group(1, 3, dropped), group(2, 2), group(2, policys)])
    assert metrics["reward/mean"] == pytest.approx(10 / 6)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(22 / 6 - (10 / 6) ** 2))
    assert metrics["reward/errors"] == 2
    assert metrics["reward/errors/judge"] == metrics["reward/errors/raised"] == 1
    assert metrics["group/with_signal"] == pytest.approx(2 / 3)
    assert metrics["tokens/sampled"] == 21 and metrics["rollout/length"] == 3


def test_a_rollout_that_failed_before_its_first_token_has_no_length_and_one_that_chose_to_say_nothing_has():
    plain = group(1, 1, Score(0.0, "the prompt leaves no room", cause="too_long"))
    silent = replace(plain.rollouts[0], segments=plain.rollouts[0].segments[:1], versions=None)
    begun = tuple(replace(rollout, counts={"turns": 2}) for rollout in plain.rollouts[:2])
    lost = group_metrics([replace(plain, rollouts=(*begun, silent))])
    assert lost["rollout/length"] == 3 and lost["rollout/truncated"] == 0 and lost["episode/turns"] == 2
    said_nothing = replace(plain, rollouts=(*begun, silent), scores=(*plain.scores[:2], Score(0.0)))
    assert group_metrics([said_nothing])["rollout/length"] == 2
    nobody = group_metrics([replace(plain, rollouts=(silent,), scores=plain.scores[2:])])
    assert math.isnan(nobody["rollout/length"]) and math.isnan(nobody["rollout/truncated"])


def test_right_answers_are_counted_apart_from_rewards():
    metrics = group_metrics([group(Score(10.0, verdict=True), Score(2.0, verdict=False), Score(0.5))])
    assert metrics["reward/correct"] == pytest.approx(1 / 3)


def test_a_step_whose_samples_all_failed_has_no_mean():
    metrics = group_metrics([group(*[Score(9.0, "no answer", cause="judge")] * 2)])
    assert math.isnan(metrics["reward/mean"]) and math.isnan(metrics["reward/std"])
    assert metrics["reward/errors"] == 2
    assert group_metrics([]) == {}


def test_how_much_of_the_returns_the_values_explain():
    """Returns 1 and 3 have a variance of 1; values that miss each by 0.5 leave a quarter of it."""
    update = {
        "tokens:sum": 2, "return:sum": 4.0, "return_squared:sum": 10.0, "error:sum": 0.5, "loss:sum": 6.0,
        "denominator": 4.0, "grad_norm": 2.0,
    }  # fmt: skip
    later = update | {"error:sum": 0.0, "loss:sum": 2.0, "grad_norm": 4.0}  # values that have learned them
    assert critic_metrics([update, later]) == {
        "critic/explained": 0.75, "critic/loss": 1.0, "critic/grad_norm": 3.0
    }  # fmt: skip
    assert math.isnan(critic_metrics([update | {"return_squared:sum": 8.0}])["critic/explained"])
    empty = {
        "tokens:sum": 0,
        "loss:sum": 0.0,
        "denominator": 4.0,
        "grad_norm": 0.0,
    }  # of filler alone, of which no loss is asked
    assert math.isnan(critic_metrics([empty, later])["critic/explained"])


def test_the_gap_is_that_of_the_first_update_and_all_else_of_all_of_them():
    first = {
        "tokens:sum": 4, "computed:sum": 10, "unshared:sum": 12, "cuts:sum": 1, "entropy:sum": 8.0,
        "logprob_diff:sum": 2.0, "logprob_diff:max": 0.9, "ratio_outside:sum": 1, "ratio:max": 1.5,
        "loss:sum": 8.0, "denominator": 4.0, "grad_norm": 1.0,
    }  # fmt: skip
    second = first | {
        "tokens:sum": 6, "entropy:sum": 2.0, "logprob_diff:sum": 99.0, "logprob_diff:max": 99.0,
        "ratio_outside:sum": 6, "ratio:max": 2.5, "loss:sum": 6.0, "denominator": 1.0, "grad_norm": 2.0,
    }  # fmt: skip
    expected = {
        "updates": 2, "loss": 4.0, "grad_norm": 1.5, "entropy": 1.0, "ratio/max": 2.5, "tokens/trained": 10,
        "tokens/computed": 20, "tokens/computed_unshared": 24, "tokens/cuts": 2,
    }  # fmt: skip
    assert learning_metrics([first, second], sampled=False) == expected
    gap = {"logprob_diff/mean": 0.5, "logprob_diff/max": 0.9, "logprob_diff/ratio_outside": 0.25}
    assert learning_metrics([first, second], sampled=True) == expected | gap
    pairs = {"dpo/pairs:sum": 4, "dpo/accuracy:sum": 3, "dpo/margin:sum": 6.0}
    other = {"dpo/pairs:sum": 2, "dpo/accuracy:sum": 0, "dpo/margin:sum": -3.0}
    with_pairs = learning_metrics([first | pairs, second | other], sampled=False)
    assert with_pairs == expected | {"dpo/accuracy": 0.5, "dpo/margin": 0.5}


def sampled_by(*ranges):
    """A group, of which each rollout was sampled by these versions; None: not at all."""
    plain = group(*[1] * len(ranges))
    versions = [VersionRange(*r) if r else None for r in ranges]
    rollouts = [replace(plain.rollouts[0], versions=v) for v in versions]
    return replace(plain, rollouts=tuple(rollouts))


def test_a_groups_age_is_that_of_its_oldest_token():
    groups = [sampled_by((7, 9), (5, 9), None), sampled_by((8, 8), (9, 9)), sampled_by(None)]
    assert offpolicy_metrics(groups, 9) == {"offpolicy/mean": 2.5, "offpolicy/max": 4}
    assert offpolicy_metrics([sampled_by(None)], 9) == {"offpolicy/mean": 0, "offpolicy/max": 0}


def test_a_held_out_problem_is_right_only_with_the_whole_reward():
    def of_task(task, score):
        problem = Problem("1", "q", "a", task=task)
        segments = (Segment([3], True, [-1.0]),)
        rollout = Rollout(problem, segments, "", StopReason.STOP, VersionRange(0, 0))
        return replace(group(1), rollouts=(rollout,), scores=(score,))

    groups = [
        of_task("sums", Score(1.0)),
        of_task("sums", Score(0.9)),
        of_task("words", Score(1.0, "no answer", cause="judge")),
        of_task("", Score(0.1, verdict=True)),
    ]
    assert eval_metrics(groups) == {
        "eval/accuracy": 0.5, "eval/accuracy/sums": 0.5, "eval/accuracy/words": 0.0, "eval/errors": 1,
        "eval/standard_error": 0.25, "eval/reward": 0.75,
    }  # fmt: skip
    nested = [
        of_task(f"maths/{name}", Score(float(right))) for name, right in (("a/x", 1), ("a/y", 0), ("b", 1))
    ]
    of_levels = {name: value for name, value in eval_metrics(nested).items() if "accuracy/" in name}
    assert of_levels == {
        "eval/accuracy/maths": pytest.approx(2 / 3), "eval/accuracy/maths/a": 0.5, "eval/accuracy/maths/a/x": 1.0,
        "eval/accuracy/maths/a/y": 0.0, "eval/accuracy/maths/b": 1.0,
    }  # fmt: skip


def test_what_a_loss_measures_of_its_own_is_recorded_whatever_it_is_called():
    of_loss = {
        "margin:sum": 5.0,
        "preferred:sum": 10.0,
        "pairs:sum": 20.0,
        "margin_top:max": 3.0,
        "error:max": 4.0,
    }
    update = {"loss:sum": 1.0, "tokens:sum": 10.0, "computed:sum": 10.0, "unshared:sum": 10.0, "cuts:sum": 0.0,
              "grad_norm": 1.0, "denominator": 1.0, **of_loss}  # fmt: skip
    metrics = learning_metrics([update], sampled=False)
    assert {name: metrics.get(name) for name in ("margin", "preferred", "pairs", "margin_top/max", "error/max")} == {
        "margin": 0.5, "preferred": 1.0, "pairs": 2.0, "margin_top/max": 3.0, "error/max": 4.0,
    }  # fmt: skip


def test_a_group_of_one_has_nothing_to_compare():
    """It says nothing of whether groups differ, and where all are of one, nothing does."""
    alone = group_metrics([group(Score(1.0)), group(Score(0.0))])
    assert math.isnan(alone["group/with_signal"]) and alone["reward/std"] == 0.5
    dropped = group(Score(1.0), Score(0.0, "the judge is down", cause="judge"))
    assert group_metrics([dropped, group(1, 0), group(1, 1)])["group/with_signal"] == 0.5


def test_an_update_of_filler_alone_adds_nothing_to_the_means():
    """It is asked for no loss, and so has no entropy."""
    update = {
        "tokens:sum": 4, "computed:sum": 4, "unshared:sum": 4, "cuts:sum": 0, "entropy:sum": 8.0,
        "loss:sum": 8.0, "denominator": 4.0, "grad_norm": 1.0,
    }  # fmt: skip
    filler = update | {"tokens:sum": 0, "loss:sum": 0.0}
    del filler["entropy:sum"]
    assert learning_metrics([update, filler], sampled=False)["entropy"] == 2.0
