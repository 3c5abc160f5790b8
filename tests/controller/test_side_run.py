"""The directories of evaluations and replays: each its own, with the logs that messages name."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

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
