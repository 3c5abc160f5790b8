"""The directories of evaluations and replays: each its own, with the logs that messages name."""

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from configs.quickstart import quickstart
from rl.config.codec import read_config
from rl.controller import evaluate
from rl.controller import run as run_module
from rl.controller.side_run import own_directory
from rl.errors import ConfigError, RunError
from rl.types import Group, Problem, Rollout, Score, StopReason, VersionRange

AT_ONCE = 16


@pytest.fixture
def one_second(tmp_path, monkeypatch):
    """All that starts, starts in the same second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")


def test_those_that_start_in_the_same_second_have_a_directory_each(one_second):
    def start(number):
        with own_directory("eval") as directory:
            (directory / "eval.json").write_text(str(number))
        return directory

    with ThreadPoolExecutor(AT_ONCE) as threads:
        directories = list(threads.map(start, range(AT_ONCE)))
    assert len(set(directories)) == AT_ONCE
    assert [(directory / "eval.json").read_text() for directory in directories] == [*map(str, range(AT_ONCE))]


def test_so_have_runs_without_a_name(one_second, monkeypatch):
    directories = []

    async def main(recipe, config, run_dir, *_):
        directories.append(run_dir)

    monkeypatch.setattr(run_module, "_main", main)
    for _ in range(2):
        assert run_module.run("quickstart", quickstart()) == 0
    assert [directory.name for directory in directories] == [
        "quickstart-20260101-000000",
        "quickstart-20260101-000000-2",
    ]


def test_hosts_of_a_group_are_no_setting_of_its_run(one_second, monkeypatch):
    """Their addresses go with the job: who reads config.json later would wait for them."""
    used = []

    async def main(recipe, config, run_dir, *_):
        used.append((config.hosts, read_config(str(run_dir / "config.json"))[1]["hosts"]))

    monkeypatch.setattr(run_module, "_main", main)
    monkeypatch.setattr(run_module, "validate", lambda *_, **__: [])
    for hosts_last in (True, False):
        run_module.run("quickstart", replace(quickstart(), hosts="127.0.0.1:1"), hosts_last=hosts_last)
    assert used == [("127.0.0.1:1", "127.0.0.1:1"), ("127.0.0.1:1", "")]


def test_a_directory_that_is_named_is_for_one_at_a_time(tmp_path):
    named = str(tmp_path / "mine")
    with own_directory("eval", named) as directory:
        with (
            pytest.raises(ConfigError, match="belongs to a model evaluation that is under way") as failure,
            own_directory("eval", named),
        ):
            pass
        assert f"pid {os.getpid()}" in str(failure.value)
    with own_directory("eval", named) as again:
        assert again == directory


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"the directory .*/file/mine cannot be made"),
        own_directory("replay", str(tmp_path / "file" / "mine")),
    ):
        pass


@pytest.mark.parametrize(
    "code, words", [(errno.ENOSPC, "is full; make room"), (errno.EIO, "fails; see to it")]
)
def test_a_disk_that_fails_is_named(one_second, code, words):
    with pytest.raises(RunError) as failure, own_directory("eval"):
        raise OSError(code, "x")
    assert str(failure.value) == f"the disk of runs/eval-20260101-000000 {words}"
    with pytest.raises(FileNotFoundError), own_directory("eval"):
        Path("none").read_text()


def answered(texts):
    """The group of an evaluation in which these were answered, those that are "right" with reward 1."""
    rollouts = tuple(
        Rollout(Problem("1", "q", "a"), (), text, StopReason.STOP, VersionRange(0, 0)) for text in texts
    )
    return Group(0, rollouts, tuple(Score(float(text == "right")) for text in texts))


def measure(monkeypatch, out, *groups):
    async def answers(config, num_samples, out):
        return [*groups], []

    monkeypatch.setattr(evaluate, "_answers", answers)
    evaluate._measure_all({"quickstart": quickstart()}, {"model": "m"}, 0, out)


def test_an_evaluation_whose_disk_is_full_tells_its_table_first(tmp_path, monkeypatch, capsys):
    (tmp_path / "eval.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        measure(monkeypatch, tmp_path, answered(["right"]), answered(["wrong"]))
    assert "eval/accuracy                0.5000" in capsys.readouterr().out
    answers = [json.loads(line)["response"] for line in (tmp_path / "rollouts.jsonl").open()]
    assert answers == ["right", "wrong"]
    (tmp_path / "eval.json").unlink()
    (tmp_path / "rollouts.jsonl").unlink()
    (tmp_path / "rollouts.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        measure(monkeypatch, tmp_path, answered(["right"]))
    assert json.loads((tmp_path / "eval.json").read_text())["quickstart"]["eval/accuracy"] == 1


def test_an_evaluation_of_which_every_reward_failed_keeps_what_was_answered(tmp_path, monkeypatch):
    group = replace(answered(["a"]), scores=(Score(0.0, "it failed", cause="raised"),))
    with pytest.raises(RunError, match="all 1 rewards failed"):
        measure(monkeypatch, tmp_path, group)
    (record,) = (tmp_path / "rollouts.jsonl").open()
    assert json.loads(record)["error"] == "it failed" and not (tmp_path / "eval.json").exists()


def test_a_failure_names_the_logs_and_they_are_there(one_second, capsys):
    with pytest.raises(RunError) as failure, own_directory("replay") as directory:
        (directory / "logs").mkdir()
        (directory / "logs" / "trainer.log").write_text("CUDA out of memory\n")
        raise RunError("trainer.start failed: OSError(); see logs/")
    assert str(failure.value) == (
        "trainer.start failed: OSError(); see logs/; its logs are in runs/replay-20260101-000000/logs"
    )
    assert (directory / "logs" / "trainer.log").is_file()
    assert "CUDA out of memory" in capsys.readouterr().err
