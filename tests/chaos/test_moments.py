"""Deaths at moments that random ones seldom meet: each run is then the run that nothing happened to.

Two trainer ranks and two generators, synchronous. A process is stopped first, so that the moment can be looked at, and
killed if it is the right one.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.chaos.chaos import SECONDS, SETTINGS, STOPPED_SECONDS, Victim, differences
from tests.integration.runs import pid_of

pytestmark = pytest.mark.slow
SETTING = SETTINGS[1]


def is_the_same_run(victim, whole, seconds=SECONDS):
    victim.process.wait(seconds)
    found = victim.outcome()
    assert not differences(SETTING, found, whole), found.output[-3000:]
    return found.output


def kill_when(victim, name, looks_right):
    """Stop the process at the first moment for which this holds and still holds once it is stopped; then kill it."""
    pid, deadline = pid_of(victim.process, victim.run_dir, name), time.monotonic() + SECONDS
    while not victim.is_over and time.monotonic() < deadline:
        if not looks_right(pid):
            continue
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)  # what the other processes can finish without this one
        victim.look()
        if looks_right(pid):
            os.kill(pid, signal.SIGKILL)
            return pid
        os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"the moment never came: {victim.output()[-3000:]}")


def test_a_rank_that_is_killed_as_it_starts(tmp_path, whole):
    victim = Victim(SETTING, tmp_path)
    while not victim.kill(("trainer-1",), signal.SIGKILL):
        assert not victim.is_over, victim.output()[-3000:]
        time.sleep(0.05)
    assert victim.num_steps == 0
    is_the_same_run(victim, whole)


def test_a_rank_that_dies_while_the_other_waits_for_it_in_a_collective_of_the_first_step(
    tmp_path, whole, monkeypatch
):
    """Before there is a checkpoint: the run begins again, with its warm-up."""
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    victim = Victim(replace(SETTING, recipe="mortal_in_its_loss"), tmp_path)
    output = is_the_same_run(victim, whole)
    assert (tmp_path / "died").exists() and "going on from the beginning" in output, output[-3000:]


def test_a_rank_that_is_killed_while_a_checkpoint_is_written(tmp_path, whole):
    victim = Victim(SETTING, tmp_path)
    victim.wait_for_step(1)
    kill_when(victim, "trainer-1", lambda _: any((victim.run_dir / "checkpoints").glob("*.partial")))
    assert "going on from " in is_the_same_run(victim, whole)


def test_a_generator_that_is_killed_while_it_loads_weights_is_started_again_within_five_seconds(
    tmp_path, whole
):
    victim, new = Victim(SETTING, tmp_path), None
    victim.wait_for_step(2)
    old = kill_when(
        victim, "generator-1", lambda pid: "/dev/shm/rl-" in Path(f"/proc/{pid}/maps").read_text()
    )
    killed_at = time.monotonic()
    while new in (None, old):
        assert time.monotonic() - killed_at < 5
        with contextlib.suppress(ValueError, psutil.NoSuchProcess):
            new = pid_of(victim.process, victim.run_dir, "generator-1")
    is_the_same_run(victim, whole)


def test_a_stopped_generator_is_replaced_within_five_seconds_of_its_deadline(tmp_path, whole):
    victim = Victim(SETTING, tmp_path)
    victim.wait_for_step(2)
    pid, stopped_at = pid_of(victim.process, victim.run_dir, "generator-1"), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(SECONDS)
    assert time.monotonic() - stopped_at < STOPPED_SECONDS + 5
    is_the_same_run(victim, whole)


def test_slow_processes_are_not_taken_for_stopped_ones(tmp_path, whole):
    """Eight busy processes beside the run on two cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        output = is_the_same_run(Victim(SETTING, tmp_path), whole, 3 * SECONDS)  # other tests run, too
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert "it is started again" not in output and "going on from" not in output, output[-3000:]
