"""Whether a replay could use the batches that a run keeps."""

# holds: exact

from dataclasses import replace
from itertools import product

import pytest

from configs.quickstart import quickstart
from rl.config.replay_rules import check_replay, what_a_replay_needs
from rl.config.validate import validate
from rl.controller.schedule import SaveClock, Schedule


def replayable(config):
    """The steps that `rl replay` finds a checkpoint and batches for, once the run is over."""
    schedule = Schedule(1, config.steps, 1, save_every=config.save_every)
    saved = [step for step in range(1, config.steps + 1) if schedule.saves(step)][-config.keep_checkpoints :]
    kept = range(max(1, config.steps - config.record_batches + 1), config.steps + 1)
    return {
        step
        for step in kept
        for first in saved
        if first < step and set(range(first + 1, step + 1)) <= set(kept)
    }


@pytest.mark.parametrize("steps", range(1, 13))
def test_batches_are_kept_for_a_replay_or_refused(steps):
    """Over all small runs: what is accepted can be replayed, and what is said of it is true."""
    for save_every, kept, checkpoints in product(range(8), range(1, 9), range(4)):
        config = replace(
            quickstart(), steps=steps, save_every=save_every, record_batches=kept, keep_checkpoints=checkpoints,
            save_every_minutes=0.0,
        )  # fmt: skip
        problems = check_replay(config)
        assert len(problems) == (not replayable(config)), config
        for line in problems:
            assert line.startswith(f"record_batches={kept} ") and "; set " in line
        if not problems:
            (line,) = what_a_replay_needs(config)
            first, _, last = line.partition("steps ")[2].partition(" again")[0].partition(" to ")
            assert set(range(int(first), int(last) + 1)) <= replayable(config)


def test_where_a_checkpoint_by_time_may_come_it_is_said_before_the_run():
    config = replace(quickstart(), record_batches=5)  # 100 steps, save_every=20
    assert check_replay(config) == []
    (line,) = what_a_replay_needs(config)
    assert "only save_every_minutes=10 may save" in line and "record_batches of at least 20" in line
    (line,) = what_a_replay_needs(replace(config, save_every=0))
    assert "set save_every below 100" in line
    assert what_a_replay_needs(replace(config, record_batches=0)) == []


@pytest.mark.parametrize("seconds", [7.0, 35.0, 60.0, 120.0])
def test_what_is_promised_holds_whatever_time_steps_take(seconds):
    """Checkpoints by time take the place of those by steps."""
    clock = [0.0]
    for minutes, checkpoints in product((0.0, 10.0), (0, 2, 3)):
        config = replace(
            quickstart(), steps=100, save_every=20, record_batches=20, keep_checkpoints=checkpoints,
            save_every_minutes=minutes,
        )  # fmt: skip
        save_clock = SaveClock(minutes, lambda: clock[0])
        schedule = Schedule(1, 100, 10, save_every=20, save_clock=save_clock)
        saved = []
        for step in range(1, 101):
            save_clock.begin()
            clock[0] += seconds
            if schedule.saves(step):
                saved.append(step)
                save_clock.saved()
        first = min(saved[-checkpoints:])
        (line,) = what_a_replay_needs(config)
        if "will do steps 81 to 100 again" in line:
            assert first <= 80, (minutes, checkpoints)
        else:
            assert minutes and checkpoints and "set keep_checkpoints=0" in line


def test_what_another_runs_checkpoint_would_be_needed_for_is_not_promised():
    config = replace(quickstart(), record_batches=20, save_every_minutes=0.0)  # 100 steps, save_every=20
    (line,) = what_a_replay_needs(config, 90, in_place=False)
    assert "before the last step, which this run saves none of; to be sure, set save_every below 10" in line
    (line,) = what_a_replay_needs(config, 79, in_place=False)
    assert "will do steps 81 to 100 again" in line
    (line,) = what_a_replay_needs(config, 99, in_place=False)
    assert "can do no step again" in line


def test_a_run_that_goes_on_in_its_directory_can_go_on_from_the_checkpoint_that_it_has():
    """That of step 80 may be gone: two are kept, those of 85 and 100."""
    config = replace(quickstart(), record_batches=20, save_every_minutes=0.0)
    (line,) = what_a_replay_needs(config, 85)
    assert "will do steps 86 to 100 again" in line
    (line,) = what_a_replay_needs(config, 100)  # its command once more
    assert "will do steps 81 to 100 again" in line


def test_it_is_a_problem_of_the_run():
    config = replace(quickstart(), record_batches=5, save_every_minutes=0.0)
    assert [line for line in validate(config) if "record_batches" in line] == check_replay(config) != []
