"""Weights that are pushed: a second transport in a real run, whose processes are killed, has the numbers of the first."""

import re
import signal
import subprocess
import sys

import pytest

from tests.chaos.chaos import STOPPED_SECONDS, Victim
from tests.chaos.test_moments import SETTING, is_the_same_run
from tests.devices import with_all
from tests.integration.runs import ROOT

pytestmark = pytest.mark.slow


class Pushing(Victim):
    def start(self):
        words = [
            "train",
            f"tests/recipes.py:{self.setting.recipe}",
            "--run_dir",
            self.run_dir,
            *self.setting.flags,
        ]
        words += ["--deadlines.progress", STOPPED_SECONDS, "--resume", "latest"]
        command = [sys.executable, "-m", "tests.weight_sync.pushed", *map(str, words)]
        how = {"cwd": ROOT, "env": with_all(), "stdout": self._output, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, text=True, **how)

    def counts(self, name):
        """(pushed, pulled) at each fetch of a generator, by its log; a process that is started again counts anew."""
        log = (self.run_dir / "logs" / f"{name}.log").read_text()
        return [(int(a), int(b)) for a, b in re.findall(r"'pushed': (\d+), 'pulled': (\d+)", log)]


@pytest.mark.parametrize("names", [("generator-0", "generator-1"), ("trainer-0",)])
def test_a_transport_that_pushes_gives_the_same_run_through_a_death(tmp_path, whole, names):
    victim = Pushing(SETTING, tmp_path)
    victim.wait_for_step(3)
    assert victim.kill(names, signal.SIGKILL)
    is_the_same_run(victim, whole)
    counts = [victim.counts(f"generator-{number}") for number in range(2)]
    lives = [
        each for of_one in counts for each in of_one if sum(each) == 2
    ]  # their first, of two ranks' parts
    assert {*lives} == {(0, 2)}
    # The run may end before the second that was killed is there again.
    assert len(lives) in ((2,) if names == ("trainer-0",) else (3, 4))
    assert max(counts, key=len)[-1][0] > 2  # most came before they were asked for
