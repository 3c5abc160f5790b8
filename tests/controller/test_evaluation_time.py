"""What an evaluation takes is no step's; what generators take to load the weights is, evaluated or not."""

# holds: exact

import asyncio
from dataclasses import replace

from rl.controller.schedule import SaveClock
from tests.controller.test_outages import SETTINGS
from tests.controller.whole_run import Generator, World
from tests.virtual_time import run_virtually


def run(directory, monkeypatch, **changes):
    """Of each version when it was loaded, and since when each evaluation was waited for."""
    loaded = {}
    slow = {"generator-0.load_weights": 1000, "generator-0.sample": 100}
    world = World(replace(SETTINGS, eval_every=1, steps=3, **changes), directory, slow=slow)
    world.recorder.now = lambda: asyncio.get_running_loop().time()
    load = Generator.load_weights

    async def load_weights(generator, manifest):
        await load(generator, manifest)
        loaded[manifest.version] = world.recorder.now()

    monkeypatch.setattr(Generator, "load_weights", load_weights)
    run_virtually(world.run())
    return loaded, world.recorder.waited_since


def test_weights_are_loaded_before_the_time_that_an_evaluation_takes_begins(tmp_path, monkeypatch):
    loaded, since = run(tmp_path, monkeypatch)
    assert since.keys() == {0, 1, 2, 3}
    assert since[0] == 0  # before the first step nothing is a step's
    assert all(since[step] >= loaded[step] for step in (1, 2, 3)), (since, loaded)


def test_an_evaluation_beside_steps_takes_none_of_their_time(tmp_path, monkeypatch):
    _, since = run(tmp_path, monkeypatch, max_offpolicy_steps=1)
    assert since[0] == 0 and since[1] is None and since[2] is None


def test_how_long_evaluations_take_counts_in_when_a_checkpoint_is_due(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(SaveClock, "evaluated", lambda clock, seconds: waited.append(seconds))
    run(tmp_path, monkeypatch)
    assert len(waited) == 4 and min(waited) > 0.1
