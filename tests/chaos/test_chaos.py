"""The short form of `make chaos`: one run whose processes are killed, against one that nothing happened to."""

import signal
import time
from dataclasses import replace

import pytest

from tests.chaos.chaos import CONTROLLER, SECONDS, SETTINGS, TURNS, Victim, differences

ONE_GENERATOR = replace(SETTINGS[1], flags=("--trainer.layout.shard", "2"))  # it samples what two do


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("setting", "generators"),
    [
        pytest.param(ONE_GENERATOR, ("generator-0",), id="one generator"),
        pytest.param(SETTINGS[1], ("generator-0", "generator-1"), id="two", marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_processes_are_killed_one_after_the_other_is_the_same_run(
    setting, generators, tmp_path, whole
):
    """All generators at once, a trainer rank, the controller; two trainer ranks, synchronous."""
    victim = Victim(setting, tmp_path)
    for step, names in ((2, generators), (5, ("trainer-1",)), (8, (CONTROLLER,))):
        victim.wait_for_step(step)
        assert victim.kill(names, signal.SIGKILL), victim.output()[-3000:]
    victim.process.wait(SECONDS)
    found = victim.outcome()
    assert not differences(setting, found, whole), found.output[-3000:]
    assert "going on from " in found.output and "checkpoints/step-" in found.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_by_turns_whose_processes_are_killed_is_the_run_of_those_who_stay(tmp_path, whole):
    """Of each pair, one is suspended when it dies: in all moments of a step, a tenth of it apart."""
    victim = Victim(replace(SETTINGS[1], flags=(*SETTINGS[1].flags, *TURNS)), tmp_path)
    names = [("generator-0", "generator-1"), ("trainer-1",), ("generator-1",), ("trainer-0",), (CONTROLLER,)]
    for number, died in enumerate(names):
        victim.wait_for_step(2 * number + 1)
        time.sleep(0.1 * number)
        assert victim.kill(died, signal.SIGKILL), victim.output()[-3000:]
    victim.process.wait(SECONDS)
    found = victim.outcome()
    assert not differences(SETTINGS[1], found, whole), found.output[-3000:]
