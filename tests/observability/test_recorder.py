"""What a recorder keeps of a run that goes on from an earlier step."""

import json

from rl.observability.recorder import Recorder
from rl.observability.sinks import Sinks
from rl.observability.timeline import Timeline


def record(directory, steps):
    with Recorder(directory, 9, Timeline(), Sinks([])) as recorder:
        for step in steps:
            recorder.step(step, {"reward/mean": step / 10, "logprob_diff/mean": 0.0, "loss": 1.0}, [])
            recorder.evaluation(step, {"eval/accuracy": step / 10, "eval/standard_error": 0.1}, [])


def test_what_comes_after_the_step_is_forgotten_with_a_line_that_was_cut_short(tmp_path):
    record(tmp_path, range(1, 6))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "reward/me')
    with Recorder(tmp_path, 9, Timeline(), Sinks([])) as recorder:
        recorder.rewind(3)
        assert list(recorder.rewards) == list(recorder.accuracies) == [1, 2, 3]
        recorder.evaluation(4, {"eval/accuracy": 0.5, "eval/standard_error": 0.1}, [])
        assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:-1] == lines[:6]
        assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["eval/accuracy"] == 0.5
        recorder.rewind(-1)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
