"""Whether a replay could use the batches that a run keeps."""

# holds: exact

from dataclasses import replace
from itertools import product

import pytest

from configs.quickstart import quickstart
from rl.config.replay_rules import check_replay, what_a_replay_needs
from rl.config.validate import validate
from rl.controller.schedule import Schedule


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
    assert "only save_every_minutes=10 may bring" in line and "record_batches of at least 20" in line
    (line,) = what_a_replay_needs(replace(config, save_every=0))
    assert "set save_every below steps=100" in line
    assert what_a_replay_needs(replace(config, record_batches=0)) == []


def test_it_is_a_problem_of_the_run():
    config = replace(quickstart(), record_batches=5, save_every_minutes=0.0)
    assert [line for line in validate(config) if "record_batches" in line] == check_replay(config) != []
