"""What is kept of rollouts: for people, and with every token."""

# holds: exact, the literal has four digits

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from rl.observability import rollout_log
from rl.observability.json_lines import read_records
from rl.observability.rollout_log import MAX_FAILED, RolloutLog, choose, read_whole_rollouts
from rl.types import Score, Segment
from tests.controller.fakes import build
from tests.controller.test_training_batch import group, quickstart

FAILED = Score(0.0, "ValueError: x", cause="raised")


def test_as_many_as_asked_and_those_that_failed(tmp_path):
    log = RolloutLog(tmp_path)
    log.write(1, "train", choose([group(1, 0, 0), group(0, FAILED)], num_kept=2))
    log.close()
    lines = read_records(tmp_path / "rollouts.jsonl")
    assert [line["error"] for line in lines] == [None, None, "ValueError: x"]
    whole = read_whole_rollouts(tmp_path, "train", 1)
    assert [line.items() <= more.items() for line, more in zip(lines, whole, strict=True)] == [True] * 3
    assert whole[2]["cause"] == "raised"


def test_of_many_that_failed_a_bounded_number_of_each_cause_in_turn():
    def failed(cause):
        return Score(0.0, f"it {cause}", cause=cause)

    scores = [*[failed("raised")] * 1000, *[failed("timeout")] * 3, failed("crashed")]
    rows = choose([group(1, *scores[:600]), group(1, *scores[600:])], num_kept=1)
    causes = [row.score.cause for row in rows]
    assert causes == ["", *["raised"] * (MAX_FAILED - 4), *["timeout"] * 3, "crashed"]
    assert len(choose([group(*scores)], num_kept=10**6)) == 1004
    assert choose([group(1, 0)], num_kept=0) == choose([], num_kept=4) == []


def test_every_token_with_what_was_learnt_from_it(tmp_path):
    groups = [group(0, 1)]
    batch, _ = build(groups, quickstart(), tmp_path)
    log = RolloutLog(tmp_path)
    log.write(3, "train", choose(groups, 4, batch.samples_of))
    log.write(3, "eval", choose(groups, 4))
    ((given, sampled),) = read_whole_rollouts(tmp_path, "train", 3)[0]["branches"]
    assert given == {"sampled": False, "tokens": [1, 2]}
    assert sampled["tokens"] == [3, 4, 5] and sampled["logprobs"] == [-1.0] * 3
    assert sampled["advantages"] == pytest.approx([-0.7071] * 3, abs=1e-3)
    ((_, sampled),) = read_whole_rollouts(tmp_path, "eval", 3)[0]["branches"]
    assert sampled["advantages"] is None  # it was not trained on
    log.close()


def test_equal_answers_with_different_rewards_have_each_its_own_advantages(tmp_path):
    """As a judge gives them, or a reward that failed."""
    groups = [group(1, 0, Score(0.0, "the reward worker died", cause="lost"))]
    batch, _ = build(groups, quickstart(), tmp_path)
    assert len({r.tokens.tobytes() for r in batch.groups[0].samples}) == 1
    log = RolloutLog(tmp_path)
    log.write(1, "train", choose(groups, 3, batch.samples_of))
    log.close()
    advantages = [line["branches"][0][-1]["advantages"] for line in read_whole_rollouts(tmp_path, "train", 1)]
    assert advantages[0][0] > 0 > advantages[1][0] and advantages[2] is None


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 9])
@pytest.mark.parametrize("num_forks", [0, 2])
def test_in_pieces_it_is_the_json_of_the_whole(monkeypatch, num_tokens, num_forks):
    monkeypatch.setattr(rollout_log, "_NUM_AT_ONCE", 4)
    (row,) = choose([group(1)], num_kept=1)
    logprobs = [-1.5, math.nan, -math.inf, 0.1 + 0.2, 1e-30, 1.0, 2.0, 3.0, 4.0][:num_tokens]
    logprobs = np.array(logprobs, np.float32).tolist()
    segments = (Segment([1, 2], False, [0.0, 0.0]), Segment(list(range(num_tokens)), True, logprobs))
    order = (1, 0, 2)[: num_forks and 3]
    rollout = replace(
        row.rollout, segments=segments, forks=(segments,) * num_forks, counts={"turns": 2}, turn_order=order
    )
    record = {"step": 1, "note": {"nested": ["x", {"a": 1}]}}
    branch = [
        {"sampled": False, "tokens": [1, 2]},
        {"sampled": True, "tokens": list(range(num_tokens)), "logprobs": logprobs, "advantages": None},
    ]
    whole = {**record, "seconds": 0.0, "counts": {"turns": 2}, **({"turn_order": order} if order else {})}
    whole |= {"branches": [branch] * (1 + num_forks)}
    pieces = list(rollout_log._whole_line(record, replace(row, rollout=rollout)))
    assert "".join(pieces) == json.dumps(whole) + "\n"
    assert max(piece.count(", ") for piece in pieces[1:]) <= 4


def test_what_comes_after_a_step_is_forgotten(tmp_path):
    log = RolloutLog(tmp_path)
    for step in (1, 2, 10):
        for split in ("train", "eval"):
            log.write(step, split, choose([group(1)], 4))
    log.rewind(2, evaluated={1, 10})  # that of step 2 failed
    log.write(3, "train", choose([group(1)], 4))
    log.close()
    lines = [(line["step"], line["split"]) for line in read_records(tmp_path / "rollouts.jsonl")]
    assert lines == [(1, "train"), (1, "eval"), (2, "train"), (3, "train")]
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == [f"{name}.jsonl.gz" for name in ("eval-1", "train-1", "train-2", "train-3")]


@pytest.mark.parametrize(
    "name",
    [
        "my-notes.jsonl.gz", "my-9.jsonl.gz", "train-.jsonl.gz", "train-9.old.jsonl.gz", "my-train-9.jsonl.gz",
        "train-9-copy.jsonl.gz", "eval--9.jsonl.gz", "train-9.jsonl.gz.bak", "train-٩.jsonl.gz", "train-²-9.jsonl.gz",
    ],
)  # fmt: skip
def test_a_file_of_another_name_is_no_rollout_and_stays(name, tmp_path):
    log = RolloutLog(tmp_path)
    for split in ("train", "eval"):
        log.write(9, split, choose([group(1)], 4))
    (tmp_path / "rollouts" / name).touch()
    log.rewind(2, evaluated={9})
    log.close()
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == [name]
