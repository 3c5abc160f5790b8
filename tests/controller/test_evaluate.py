"""What `rl eval` says of answers."""

# holds: exact

from itertools import combinations, product
from statistics import fmean, pstdev

import pytest

from rl.controller.evaluate import evaluate, measures, pass_at_k
from rl.errors import ConfigError
from tests.controller.test_training_batch import group


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(right, k):
    answers = [1] * right + [0] * (5 - right)
    assert pass_at_k(5, right, k) == pytest.approx(fmean(max(chosen) for chosen in combinations(answers, k)))


def test_measures_of_greedy_answers_and_of_samples():
    found = measures([group(1), group(0)], [group(1, 0, 0), group(0, 0, 0)])
    assert found["eval/accuracy"] == 0.5 and found["mean reward of 3"] == pytest.approx(1 / 6)
    assert [found[f"pass@{k}"] for k in (1, 2, 3)] == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert "pass@1" not in measures([group(1)], [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model"], "no recipe is named"),
        (["model", "quickstart", "--samples"], "--samples without a value"),
        (["model", "quickstart", "--samples", "0"], "from 1 to 1024"),
        (["/nothing", "quickstart"], "/nothing has no config.json"),
        (["/nothing", "no_such_recipe"], "no_such_recipe"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, said):
    with pytest.raises(ConfigError, match=said):
        evaluate(arguments)


def test_the_standard_error_is_that_of_every_resample():
    """The accuracy's deviation over all 5^5 ways to draw the problems again."""
    answers = [1, 0, 0, 1, 1]
    accuracies = [fmean(drawn) for drawn in product(answers, repeat=5)]
    metrics = measures([group(answer) for answer in answers], [])
    assert metrics["eval/accuracy"] == pytest.approx(fmean(accuracies))
    assert metrics["eval/standard_error"] == pytest.approx(pstdev(accuracies))
