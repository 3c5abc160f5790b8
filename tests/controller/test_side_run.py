"""The directories of evaluations and replays: each its own, with the logs that messages name."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.config.codec import read_config
from rl.controller import run as run_module
from rl.controller.side_run import own_directory
from rl.errors import ConfigError, RunError

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
