"""What chaos.py takes for another run than the one that nothing happened to, on runs that are made up."""

import json
import re
from dataclasses import replace

import pytest

from tests.chaos.chaos import SETTINGS, Outcome, differences, lost_and_doubled

SYNCHRONOUS, ASYNCHRONOUS = SETTINGS[0], SETTINGS[2]
P, STEPS = 2, 3


def run(change=lambda line: line, number=lambda line: line, **settings):
    """Three steps of two prompts, each sampled one version back; with a change to lines of its files."""
    lines = [
        {"step": step, "split": "train", "prompt": P * (step - 1) + i, "question": f"q{P * (step - 1) + i}",
         "answer": "a", "policy_version": [max(0, step - 2), step - 1]}
        for step in range(1, STEPS + 1) for i in range(P)
    ] + [
        {"step": step, "split": "eval", "prompt": i, "question": f"e{i}", "answer": "a", "policy_version": [step, step]}
        for step in (0, STEPS) for i in range(2)
    ]  # fmt: skip
    numbers = [{"step": step, "loss": 1.0, "lr": 0.1, "offpolicy/max": 1} for step in range(1, STEPS + 1)]
    numbers = [{"step": 0, "eval/accuracy": 0.5}, *numbers]
    rollouts = "\n".join(json.dumps(change(line)) for line in lines)
    return Outcome(
        True, numbers=[number(line) for line in numbers], rollouts=rollouts, weights="w", **settings
    )


def changed(where, **values):
    return lambda line: line | values if where(line) else line


def test_a_run_is_like_itself():
    for setting in (SYNCHRONOUS, ASYNCHRONOUS):
        assert differences(setting, run(), run()) == []


AS_ANY = {
    "it did not survive": replace(run(), survived=False),
    r"prompts \[3\] lost": run(lost=[3]),
    r"prompts \[4\] doubled": run(doubled=[4]),
    "left behind": run(left_behind=["pid 1"]),
    "recorded steps": run(number=changed(lambda line: line["step"] == 2, step=3)),
}
AS_ASYNCHRONOUS = {
    "bound on staleness": run(changed(lambda line: line["step"] == 3, policy_version=[0, 2])),
    "the bound on staleness": run(number=changed(lambda line: line["step"] == 3, **{"offpolicy/max": 2})),
    "train: other problems": run(changed(lambda line: line["prompt"] == 4, question="another")),
    "eval: other problems": run(changed(lambda line: line["split"] == "eval" and line["step"] == 3, answer="b")),
    "steps of other sizes": run(changed(lambda line: line["prompt"] == 3, step=3)),
    "other learning rates": run(number=changed(lambda line: line["step"] == 2, lr=0.2)),
    "another accuracy before the first step": run(number=changed(lambda line: line["step"] == 0, **{"eval/accuracy": 0.25})),
}  # fmt: skip
AS_SYNCHRONOUS = {
    "metrics differ": run(number=changed(lambda line: line["step"] == 2, loss=1.1)),
    "rollouts differ": run(changed(lambda line: line["prompt"] == 4, question="another")),
    "weights differ": replace(run(), weights="others"),
}


@pytest.mark.parametrize(
    ("setting", "what", "got"),
    [(s, *case) for s in (SYNCHRONOUS, ASYNCHRONOUS) for case in AS_ANY.items()]
    + [(ASYNCHRONOUS, *case) for case in AS_ASYNCHRONOUS.items()]
    + [(SYNCHRONOUS, *case) for case in AS_SYNCHRONOUS.items()],
)
def test_a_difference_is_named(setting, what, got):
    found = differences(setting, got, run())
    assert any(re.search(what, text) for text in found), found


def test_an_asynchronous_run_may_sample_other_words_and_learn_other_weights():
    other = run(changed(lambda line: line["split"] == "train", response="others"))
    assert differences(ASYNCHRONOUS, replace(other, weights="others"), run()) == []


def test_one_lost_prompt_and_one_doubled_do_not_cancel():
    trained = {(step, P * (step - 1) + i) for step in range(1, STEPS + 1) for i in range(P)}
    assert lost_and_doubled(6, [], trained) == ([], [])
    assert lost_and_doubled(8, [6, 7], trained) == ([], [])
    assert lost_and_doubled(6, [], trained - {(2, 3)} | {(2, 4)}) == ([3], [4])
    assert lost_and_doubled(6, [5], trained) == ([], [5])
    assert lost_and_doubled(7, [], trained) == ([6], [])
