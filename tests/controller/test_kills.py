"""A controller that is killed at its writes: the run goes on, to the same files and the same numbers."""

import subprocess
import sys

import pytest

from tests.controller.kills import SETTINGS
from tests.integration.runs import ROOT


def killed(setting, directory, first, every):
    command = [sys.executable, "-m", "tests.controller.kills", setting, directory, first, every]
    return subprocess.run(map(str, command), cwd=ROOT, capture_output=True, text=True, timeout=850)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_kill_at_some_writes_changes_nothing(setting, tmp_path):
    done = killed(setting, tmp_path, 7, 67)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_kill_at_every_fourth_write_changes_nothing(setting, tmp_path):
    """All take a quarter of an hour for each setting: EVERY is 1 then."""
    done = killed(setting, tmp_path, 2, 4)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
