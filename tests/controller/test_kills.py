"""A controller that is killed at its writes: the run goes on, to the same files and the same numbers."""

import subprocess
import sys

import pytest

from tests.controller.kills import SETTINGS
from tests.integration.runs import ROOT


def killed(directory, first, every, *settings):
    command = [sys.executable, "-m", "tests.controller.kills", directory, first, every, *settings]
    return subprocess.run(map(str, command), cwd=ROOT, capture_output=True, text=True, timeout=850)


def test_a_kill_at_some_writes_changes_nothing(tmp_path):
    done = killed(tmp_path, 7, 67, *SETTINGS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_kill_at_every_fourth_write_changes_nothing(setting, tmp_path):
    """EVERY is 1 where all are tried."""
    done = killed(tmp_path, 2, 4, setting)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
