"""What tests of hosts share."""

import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.hosts.runs import MORTAL, RL, TWO_RANKS, numbers


@pytest.fixture
def directory():
    """One that all hosts see."""
    with tempfile.TemporaryDirectory(prefix="rl-hosts-", dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def on_one_host(tmp_path_factory):
    """The numbers of the same run on this host."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    words = [*RL, "train", MORTAL, *TWO_RANKS, "--run_dir", str(run_dir)]
    subprocess.run(words, check=True, capture_output=True, timeout=240)
    return numbers(run_dir)
