"""What is kept of rollouts: for people, and with every token."""

# holds: exact, the literal has four digits

import pytest

from rl.observability.rollout_log import RolloutLog, read_records, read_whole_rollouts
from rl.types import Score
from tests.controller.fakes import build
from tests.controller.test_training_batch import group, quickstart

FAILED = Score(0.0, "ValueError: x", cause="raised")


def test_as_many_as_asked_and_every_failed_one(tmp_path):
    log = RolloutLog(tmp_path, num_kept=2)
    log.write(1, "train", [group(1, 0, 0), group(0, FAILED)])
    log.close()
    lines = read_records(tmp_path / "rollouts.jsonl")
    assert [line["error"] for line in lines] == [None, None, "ValueError: x"]
    whole = read_whole_rollouts(tmp_path, "train", 1)
    assert [line.items() <= more.items() for line, more in zip(lines, whole, strict=True)] == [True] * 3
    assert whole[2]["cause"] == "raised"


def test_every_token_with_what_was_learnt_from_it(tmp_path):
    groups = [group(0, 1)]
    batch, _ = build(groups, quickstart(), tmp_path)
    log = RolloutLog(tmp_path, num_kept=4)
    log.write(3, "train", groups, batch.samples_of)
    log.write(3, "eval", groups)
    ((given, sampled),) = read_whole_rollouts(tmp_path, "train", 3)[0]["branches"]
    assert given == {"sampled": False, "tokens": [1, 2]}
    assert sampled["tokens"] == [3, 4, 5] and sampled["logprobs"] == [-1.0] * 3
    assert sampled["advantages"] == pytest.approx([-0.7071] * 3, abs=1e-3)
    ((_, sampled),) = read_whole_rollouts(tmp_path, "eval", 3)[0]["branches"]
    assert sampled["advantages"] is None  # it was not trained on
    log.close()


def test_what_comes_after_a_step_is_forgotten(tmp_path):
    log = RolloutLog(tmp_path, num_kept=4)
    for step in (1, 2, 10):
        log.write(step, "train", [group(1)])
    log.rewind(2)
    log.write(3, "train", [group(1)])
    log.close()
    assert [line["step"] for line in read_records(tmp_path / "rollouts.jsonl")] == [1, 2, 3]
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["train-1.jsonl.gz", "train-2.jsonl.gz", "train-3.jsonl.gz"]
