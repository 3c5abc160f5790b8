"""Sinks of metrics: none ends a run or holds it up; what they have after a restart, with their own packages."""

import asyncio
import json
import math
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rl.observability import trackers
from rl.observability.sinks import _MODULES, _PACKAGES, Sinks, TrackingConfig, open_sinks
from rl.observability.trackers import MLflow, TensorBoard
from tests.observability.test_writer import EXITS, RAISED


class Failing:
    def __init__(self, after, error):
        self.left, self.error = after, error

    def log(self, step, metrics):
        self.left -= 1
        if self.left < 0:
            raise self.error

    def close(self, failed):
        raise self.error


class Keeping:
    def __init__(self):
        self.seen, self.closed = [], None

    def log(self, step, metrics):
        self.seen.append((step, dict(metrics)))

    def rewind(self, step):
        self.seen = [(n, metrics) for n, metrics in self.seen if n <= step]

    def close(self, failed):
        self.closed = failed


class Hanging(Keeping):
    """Until the gate is opened."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def log(self, step, metrics):
        self.gate.wait()
        super().log(step, metrics)


def log_and_close(sinks, steps, failed=False):
    """What was said."""

    async def main():
        lines = [line for step in steps for line in sinks.log(step, {"loss": float(step)})]
        return lines + await sinks.close(failed)

    return asyncio.run(main())


@pytest.mark.parametrize("error", [*RAISED, *EXITS], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_sink_that_fails_is_named_once_and_the_others_go_on(error, after):
    keeping = Keeping()
    sinks = Sinks({"wandb": lambda: Failing(after, error), "mlflow": lambda: keeping})
    assert log_and_close(sinks, (1, 2, 3), failed=True) == ["wandb gets no more metrics: x"]
    assert [step for step, _ in keeping.seen] == [1, 2, 3] and keeping.closed is True


class Wordless(Exception):
    def __str__(self):
        raise ValueError("no words")


def test_a_sink_whose_error_has_no_words_is_named():
    sinks = Sinks({"wandb": lambda: Failing(0, Wordless())})
    assert log_and_close(sinks, (1, 2)) == ["wandb gets no more metrics: Wordless"]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
@pytest.mark.parametrize(
    "error", [*RAISED, SystemExit("x"), Wordless()], ids=lambda error: type(error).__name__
)
def test_a_sink_whose_package_does_not_import_is_named_and_the_others_go_on(
    tmp_path, monkeypatch, name, error
):
    class Broken:
        def find_spec(self, module, *_):
            if module == _MODULES[name]:
                raise error

    monkeypatch.delitem(sys.modules, _MODULES[name], raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    sinks = open_sinks(TrackingConfig((name,)), tmp_path, {})
    (line,) = log_and_close(sinks, (1, 2))
    assert line.startswith(
        f"{name} gets no more metrics: {_MODULES[name]} does not import ({type(error).__name__}"
    )
    assert line.endswith(f"pip install --force-reinstall {_PACKAGES[name]}")


def test_a_sink_that_cannot_be_opened_is_named():
    def opener():
        raise OSError("no server")

    assert log_and_close(Sinks({"mlflow": opener}), (1, 2)) == ["mlflow gets no more metrics: no server"]


def test_a_sink_that_hangs_loses_metrics_and_says_how_many():
    hanging, keeping = Hanging(), Keeping()
    sinks = Sinks({"mlflow": lambda: hanging, "wandb": lambda: keeping}, max_waiting=3, close_seconds=0.05)

    async def main():
        lines = []
        for step in range(1, 11):
            lines += sinks.log(step, {"loss": 1.0})
            while len(keeping.seen) < step:  # the others keep up
                await asyncio.sleep(0.001)
        return lines + await sinks.close(False)

    *dropped, late, lacks = asyncio.run(main())
    assert len(dropped) == 1 and dropped[0].startswith(
        "mlflow does not keep up: it loses the metrics from step "
    )
    assert late == "mlflow did not end within 0 s and is left alone"
    assert lacks == "mlflow lacks the metrics of 10 steps and evaluations"
    assert keeping.closed is False and hanging.closed is None
    hanging.gate.set()


def test_a_sink_that_is_behind_for_a_while_lacks_what_did_not_fit():
    slow = Hanging()
    sinks = Sinks({"mlflow": lambda: slow}, max_waiting=2)

    async def main():
        lines = [line for step in range(1, 9) for line in sinks.log(step, {})]
        slow.gate.set()
        while len(slow.seen) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        return lines + sinks.log(9, {}) + await sinks.close(False)

    first, lacks = asyncio.run(main())
    num_kept = len(slow.seen)
    assert first.startswith("mlflow does not keep up")
    assert lacks == f"mlflow lacks the metrics of {9 - num_kept} steps and evaluations"


def test_what_was_logged_before_is_there_when_steps_are_forgotten():
    keeping = Keeping()
    sinks = Sinks({"x": lambda: keeping})
    for step in range(1, 6):
        sinks.log(step, {})
    sinks.rewind(3)
    assert log_and_close(sinks, (4,)) == [] and [step for step, _ in keeping.seen] == [1, 2, 3, 4]


def test_what_is_not_installed_is_found_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert TrackingConfig(sinks=("tensorboard", "wandb")).validate() == []
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", "/nowhere")
    (line,) = TrackingConfig(sinks=("wandb",)).validate()
    assert "wandb, which has no key here; set WANDB_API_KEY" in line
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert TrackingConfig(sinks=("wandb",)).validate() == []
    (line,) = TrackingConfig(sinks=("mlflow",)).validate()
    assert line == "tracking.sinks names mlflow, which is not installed; run: pip install mlflow-skinny"
    (line,) = TrackingConfig(project="x").validate()
    assert "tracking.project=x has no effect" in line


@pytest.fixture
def no_wandb(monkeypatch, tmp_path):
    """W&B is installed, and nobody has logged in. Returns the user's settings file."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "MODE", "DISABLED", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    (tmp_path / "config").mkdir()
    return tmp_path / "config" / "settings"


def log_in(tmp_path, machine):
    (tmp_path / "netrc").write_text(f"machine {machine}\n  login user\n  password {'0' * 40}\n")


def has_key():
    return not TrackingConfig(sinks=("wandb",)).validate()


def test_a_login_to_a_server_of_ones_own_is_a_key(no_wandb, monkeypatch, tmp_path):
    assert not has_key()
    log_in(tmp_path, "wandb.lab:8080")  # as `wandb login` writes it
    assert not has_key()
    no_wandb.write_text("[default]\nbase_url = http://wandb.lab:8080\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.lab:9090")  # over the file
    assert not has_key()
    log_in(tmp_path, "wandb.lab")
    assert has_key()


def test_a_login_that_others_may_read_is_a_key_as_for_wandb(no_wandb, monkeypatch, tmp_path):
    """Python refuses a ~/.netrc of such permissions where it has to find the file itself; W&B names it."""
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("HOME", str(tmp_path))
    log_in(tmp_path, "api.wandb.ai")
    for name in (".netrc", "_netrc"):
        assert not has_key()
        (tmp_path / "netrc").rename(tmp_path / name)
        (tmp_path / name).chmod(0o644)
        assert has_key()
        (tmp_path / name).rename(tmp_path / "netrc")


def test_wandb_offline_needs_no_key(no_wandb, monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    assert has_key()
    monkeypatch.setenv("WANDB_MODE", "online")  # over the file
    assert not has_key()
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "wandb" / "settings").write_text("no settings\n")
    assert not has_key()


def restarted(tracking, run_dir, settings):
    """Steps 1 to 3, of which 3 happens again; the process starts again after 2. Each step has its own value."""
    lines = []
    for before, steps, values in ((-1, (1, 2, 3), 1), (2, (3,), 2), (None, (), 0), (2, (3, 4), 3)):
        if before in (-1, None):
            sinks = open_sinks(tracking, run_dir, settings)
        if before is not None:
            sinks.rewind(before)
        for step in steps:
            lines += sinks.log(step, {"reward/mean": step + values / 8, "loss": math.nan})
        if values in (2, 3):
            lines += asyncio.run(sinks.close(failed=values == 2))
    assert not lines


def test_tensorboard_has_each_step_once_after_a_restart(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    restarted(TrackingConfig(), tmp_path, {})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert values == [(1, 1.125), (2, 2.125), (3, 3.375), (4, 4.375)]
    assert json.dumps(sorted(events.Tags()["scalars"])) == '["loss", "reward/mean"]'


def test_tensorboard_keeps_the_warm_up_where_steps_happen_again(tmp_path):
    """Its steps are counted from 1, too."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    board = TensorBoard(tmp_path)
    for step in range(1, 31):
        board.log(step, {"warmup/loss": 1 / step})
    for step in range(1, 11):
        board.log(step, {"loss": 1.0})
    board.close(failed=True)
    time.sleep(1.1)  # its files are read in the order of their names, which begin with the second
    board = TensorBoard(tmp_path)
    board.rewind(5)
    board.log(6, {"loss": 2.0})
    board.close(failed=False)
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in runs.Scalars("warmup", "warmup/loss")] == [*range(1, 31)]
    assert [event.step for event in runs.Scalars(".", "loss")] == [*range(1, 7)]


@pytest.mark.parametrize("in_a_new_process", [False, True])
def test_a_warm_up_that_happens_again_is_in_tensorboard_once(tmp_path, in_a_new_process):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    board = TensorBoard(tmp_path)
    for step in range(1, 6):
        board.log(step, {"warmup/loss": 1.0})
    if in_a_new_process:
        board.close(failed=True)
    time.sleep(1.1)  # as above
    board = TensorBoard(tmp_path) if in_a_new_process else board
    board.rewind(-1 if in_a_new_process else 0)
    for step in range(1, 4):
        board.log(step, {"warmup/loss": 2.0})
    board.close(failed=False)
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard")).Reload()
    seen = [(event.step, event.value) for event in runs.Scalars("warmup", "warmup/loss")]
    assert seen == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_mlflow_goes_on_in_its_run_and_has_each_step_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    (tmp_path / "run").mkdir()
    restarted(TrackingConfig(("mlflow",), "p"), tmp_path / "run", {"steps": 2, "trainer": {"lr": 0.1}})
    (run,) = mlflow.search_runs(experiment_names=["p"], output_format="list")
    assert run.info.status == "FINISHED" and run.data.params["trainer.lr"] == "0.1"
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [
        (1, 1.125),
        (2, 2.125),
        (3, 3.125),
        (4, 4.375),
    ]
    assert set(run.data.metrics) == {"reward/mean"}


def test_mlflow_takes_metrics_of_any_names(tmp_path, monkeypatch):
    """Those of parts beside the whole, and of tasks and rewards that a user named."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    (tmp_path / "run").mkdir()
    tracker = MLflow("p", tmp_path / "run", {})
    names = ("reward/errors", "reward/errors/timeout", "eval/accuracy/C++", "eval/accuracy", "part/<lambda>")
    tracker.log(1, dict.fromkeys(names, 0.5))
    tracker.close(failed=False)
    (run,) = mlflow.search_runs(experiment_names=["p"], output_format="list")
    readable = {"reward/errors.timeout", "eval/accuracy.C__", "part/_lambda_"}
    assert set(run.data.metrics) == {"reward/errors", "eval/accuracy"} | readable


def test_wandb_goes_on_in_its_run_and_has_each_step_once(tmp_path, monkeypatch):
    asked, logged, ended = [], [], []

    def init(**options):
        asked.append(options)
        return SimpleNamespace(
            id=options.get("id", "new"),
            define_metric=lambda name, step_metric: None,
            log=logged.append,
            finish=lambda exit_code: ended.append(exit_code),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **limits: limits))
    restarted(TrackingConfig(("wandb",), "p"), tmp_path, {"steps": 2})
    first, again = asked
    assert "id" not in first and (again["id"], again["resume"]) == ("new", "allow")
    assert first["project"] == again["project"] == "p" and first["name"] == tmp_path.name
    assert first["settings"]["finish_timeout"] == 50.0 and first["config"] == {"steps": 2}
    assert [line["step"] for line in logged] == [1, 2, 3, 4] and ended == [1, 0]


def test_what_a_users_own_variables_say_of_wandb_stands_unless_a_project_is_set(tmp_path, monkeypatch):
    asked = []

    def init(**options):
        asked.append(options)
        calls = dict.fromkeys(("define_metric", "log", "finish"), lambda *_, **__: None)
        return SimpleNamespace(id="new", **calls)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **limits: limits))
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in "abc":
        (tmp_path / name).mkdir()
    trackers.WandB("", tmp_path / "a", {})
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_NAME", "first")
    monkeypatch.setenv("WANDB_DIR", "/scratch")
    trackers.WandB("", tmp_path / "b", {})
    trackers.WandB("set", tmp_path / "c", {})
    found = [(options["project"], options["name"], options["dir"]) for options in asked]
    assert found == [
        ("rl", "a", str(tmp_path / "a")), ("mine", "first", "/scratch"), ("set", "first", "/scratch"),
    ]  # fmt: skip


def test_a_broken_note_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    (tmp_path / "tracking").mkdir()
    for content in ("", "3", "{}", '{"id": 1, "steps": 2}'):
        (tmp_path / "tracking" / "wandb.json").write_text(content)
        (line,) = log_and_close(open_sinks(TrackingConfig(("wandb",), "p"), tmp_path, {}), (1,))
        assert "tracking/wandb.json is broken (" in line and line.endswith("remove it to begin another run")


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracking, settings = TrackingConfig(("wandb",), "p"), {"steps": 2, "trainer": {"lr": 0.1}}
    for step in (1, 2):
        sinks = open_sinks(tracking, tmp_path, settings)
        assert sinks.log(step, {"reward/mean": step / 4, "loss": math.nan}) == []
        assert asyncio.run(sinks.close(failed=False)) == []
    file, again = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert file.name == again.name  # named by the run's id
    written, deadline = b"", time.monotonic() + 20  # another process writes it
    while b"runtime" not in written and time.monotonic() < deadline:
        time.sleep(0.05)
        written = file.read_bytes()
    assert b"reward/mean" in written and b"0.25" in written and b"steps" in written


def test_wandb_draws_metrics_by_the_runs_steps(tmp_path, monkeypatch):
    """Its own are counted by calls, of which an evaluation is one more."""
    defined = []

    def init(**options):
        calls = dict.fromkeys(("log", "finish"), lambda *_, **__: None)
        return SimpleNamespace(id="new", define_metric=lambda *a, **k: defined.append((a, k)), **calls)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **limits: limits))
    trackers.WandB("p", tmp_path, {})
    assert defined == [(("*",), {"step_metric": "step"})]


@pytest.mark.parametrize(("value", "is_disabled"), [("True", True), ("1", True), ("false", False)])
def test_wandb_that_is_disabled_needs_no_key(no_wandb, monkeypatch, value, is_disabled):
    monkeypatch.setenv("WANDB_DISABLED", value)
    assert has_key() == is_disabled
