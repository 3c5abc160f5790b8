"""The short form of `make chaos`: one run whose processes are killed, against one that nothing happened to."""

import signal

import pytest

from tests.chaos.chaos import CONTROLLER, SECONDS, SETTINGS, Victim, differences


@pytest.mark.timeout(600)
def test_a_run_whose_processes_are_killed_one_after_the_other_is_the_same_run(tmp_path, whole):
    """Both generators at once, a trainer rank, the controller; two trainer ranks, two generators, synchronous."""
    setting = SETTINGS[1]
    victim = Victim(setting, tmp_path)
    for step, names in ((2, ("generator-0", "generator-1")), (5, ("trainer-1",)), (8, (CONTROLLER,))):
        victim.wait_for_step(step)
        assert victim.kill(names, signal.SIGKILL), victim.output()[-3000:]
    victim.process.wait(SECONDS)
    found = victim.outcome()
    assert not differences(setting, found, whole), found.output[-3000:]
    assert "going on from " in found.output and "checkpoints/step-" in found.output
