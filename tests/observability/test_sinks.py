"""Sinks of metrics: one that fails leaves the run alone; W&B and MLflow offline, with their own packages."""

import json
import math
import time

import pytest

from rl.observability.sinks import Sinks, TrackingConfig, open_sinks


class Failing:
    def __init__(self, after):
        self.left, self.closed = after, False

    def log(self, step, metrics):
        self.left -= 1
        if self.left < 0:
            raise OSError("the network is gone")

    def close(self, failed):
        self.closed = failed
        raise OSError("still gone")


class Keeping:
    def __init__(self):
        self.seen, self.closed = [], None

    def log(self, step, metrics):
        self.seen.append((step, dict(metrics)))

    def close(self, failed):
        self.closed = failed


def test_a_sink_that_fails_is_named_once_and_the_others_go_on():
    keeping, failing = Keeping(), Failing(after=1)
    sinks = Sinks([("wandb", failing), ("mlflow", keeping)])
    said = [sinks.log(step, {"loss": 1.0}) for step in (1, 2, 3)]
    assert said == ["", "wandb gets no more metrics: the network is gone", ""]
    assert [step for step, _ in keeping.seen] == [1, 2, 3]
    sinks.close(failed=True)
    assert keeping.closed is True


def test_what_is_not_installed_is_found_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    assert TrackingConfig(sinks=("tensorboard", "wandb")).validate() == []
    (line,) = TrackingConfig(sinks=("mlflow",)).validate()
    assert line == "tracking.sinks names mlflow, which is not installed; run: pip install mlflow-skinny"
    (line,) = TrackingConfig(project="x").validate()
    assert "tracking.project=x has no effect" in line


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sinks = open_sinks(TrackingConfig(("wandb",), "p"), tmp_path, {"steps": 2, "trainer": {"lr": 0.1}})
    assert sinks.log(1, {"reward/mean": 0.25, "loss": math.nan}) == ""
    sinks.close(failed=False)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written, deadline = b"", time.monotonic() + 20  # another process writes it
    while b"runtime" not in written and time.monotonic() < deadline:
        time.sleep(0.05)
        written = file.read_bytes()
    assert b"reward/mean" in written and b"0.25" in written and b"steps" in written


def test_mlflow_in_files(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    sinks = open_sinks(
        TrackingConfig(("mlflow",), "p"), tmp_path / "run", {"steps": 2, "trainer": {"lr": 0.1}}
    )
    assert sinks.log(1, {"reward/mean": 0.25, "loss": math.nan}) == ""
    assert sinks.log(2, {"reward/mean": 0.5}) == ""
    sinks.close(failed=True)
    (run,) = mlflow.search_runs(experiment_names=["p"], output_format="list")
    assert run.info.status == "FAILED" and run.data.params["trainer.lr"] == "0.1"
    assert run.data.metrics == {"reward/mean": 0.5}


def test_tensorboard_files(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(TrackingConfig(), tmp_path, {})
    sinks.log(3, {"reward/mean": 0.25})
    sinks.close(failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.25)]
    assert json.dumps(events.Tags()["scalars"]) == '["reward/mean"]'
