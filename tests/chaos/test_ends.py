"""Waits that had no end: each run here is the run that nothing happened to, or ends and says what died."""

import contextlib
import os
import random
import signal
import time
from dataclasses import replace

import psutil
import pytest

from tests.chaos.chaos import ASYNC, SECONDS, SETTINGS, Setting, Victim, differences, undisturbed
from tests.integration.runs import pid_of, read_metrics

pytestmark = pytest.mark.slow
SYNC = SETTINGS[0]
KILLS, BIRTHS = 20, 10
PER_KILL = 40.0  # seconds for a generator to start again, twice where the first one dies young


def meshes(victim):
    """The meshes that the children of the controller are of, with a process of each."""
    found = {}
    for child in psutil.Process(victim.process.pid).children():
        with contextlib.suppress(psutil.Error):
            if mesh := child.environ().get("RL_MESH"):
                found[mesh] = child
    return found


def kill_the_generator(victim):
    """Its mesh. It may be on its way: the one before it died a moment ago."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        assert not victim.is_over, victim.output()[-3000:]
        with contextlib.suppress(ValueError, psutil.Error, KeyError):
            process = psutil.Process(pid_of(victim.process, victim.run_dir, "generator-0"))
            mesh = process.environ()["RL_MESH"]
            process.kill()
            return mesh
        time.sleep(0.02)
    raise AssertionError(f"no generator is there: {victim.output()[-3000:]}")


def kill_the_next_born(victim, known, seconds):
    """A process of a mesh that was not there before, so many seconds after it was seen first."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for mesh, child in meshes(victim).items():
            if mesh not in known:
                time.sleep(seconds)
                child.kill()
                return
        time.sleep(0.02)
    raise AssertionError(f"nothing is spawned: {victim.output()[-3000:]}")


def test_the_last_living_generator_dies_between_steps_and_its_successors_as_they_are_born(tmp_path):
    """20 kills, and 10 more within a second of a birth: the run goes on each time, with the same numbers."""
    flags = ("--steps", str(KILLS + 2), "--generator.max_restarts", "60")
    setting = replace(SYNC, flags=flags)
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = undisturbed(setting, tmp_path / "whole")
    assert whole.survived, whole.output[-3000:]
    victim, rng = Victim(setting, tmp_path / "killed"), random.Random(0)
    for number in range(KILLS):
        victim.wait_for_step(number + 1)
        killed = kill_the_generator(victim)
        known = {killed, *meshes(victim)}  # what the killed one had started becomes the controller's child
        if number % (KILLS // BIRTHS) == 0:
            kill_the_next_born(victim, known, rng.random())
    victim.process.wait(SECONDS)
    wrong = differences(setting, victim.outcome(), whole)
    assert not wrong, wrong


def test_a_run_whose_generators_may_not_start_again_ends_with_their_name(tmp_path):
    victim = Victim(replace(SYNC, flags=("--generator.max_restarts", "0")), tmp_path)
    victim.wait_for_step(2)
    killed_at = time.monotonic()
    assert victim.kill(("generator-0",), signal.SIGKILL)
    assert victim.process.wait(SECONDS) == 1
    assert time.monotonic() - killed_at < PER_KILL
    assert "every generator has died for good" in victim.output(), victim.output()[-3000:]


def test_the_death_of_torchstore_ends_the_run_with_its_name_and_a_resume_is_the_same_run(tmp_path):
    setting = Setting("torchstore", "mortal", ("--weight_sync.transport", "torchstore"), ())
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = undisturbed(setting, tmp_path / "whole")
    victim = Victim(setting, tmp_path / "killed")
    victim.wait_for_step(4)
    assert victim.kill(("torchstore",), signal.SIGKILL)
    assert victim.process.wait(SECONDS) == 1
    assert "the process of torchstore died" in victim.output(), victim.output()[-3000:]
    victim.start()
    victim.process.wait(SECONDS)
    assert not differences(setting, victim.outcome(), whole)


@pytest.mark.parametrize("bound", ["1", "3"])
def test_a_preempted_asynchronous_run_with_dynamic_sampling_goes_on_in_place(tmp_path, bound):
    """A signal to the whole job, four times, and then the same command, or one with another bound."""
    setting = Setting("dynamic sampling", "mortal", (*ASYNC, "--resampling_rounds", "2"), ())
    victim, rng = Victim(setting, tmp_path), random.Random(int(bound))
    for step in (2, 4, 6, 8):
        victim.wait_for_step(step)
        time.sleep(rng.random())
        for process in [psutil.Process(victim.process.pid), *psutil.Process(victim.process.pid).children()]:
            try:
                os.kill(process.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        assert victim.process.wait(SECONDS) != 0, victim.output()[-3000:]
        victim.setting = replace(setting, flags=("--max_offpolicy_steps", bound, *setting.flags[2:]))
        victim.start()
    assert victim.process.wait(SECONDS) == 0, victim.output()[-3000:]
    outcome = victim.outcome()
    steps = [line["step"] for line in read_metrics(victim.run_dir) if "loss" in line]
    assert steps == list(range(1, 13)) and not outcome.left_behind
    assert max(line.get("offpolicy/max", 0) for line in outcome.numbers) <= int(bound)
