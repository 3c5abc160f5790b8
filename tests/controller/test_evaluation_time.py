"""What an evaluation takes is no step's; what generators take to load the weights is, evaluated or not."""

# holds: exact

import asyncio
from dataclasses import replace

from tests.controller.test_outages import SETTINGS
from tests.controller.whole_run import Generator, World
from tests.virtual_time import run_virtually


def test_weights_are_loaded_before_the_time_that_an_evaluation_takes_begins(tmp_path, monkeypatch):
    loaded, since = {}, {}
    world = World(replace(SETTINGS, eval_every=1, steps=2), tmp_path, slow={"generator-0.load_weights": 1000})
    world.recorder.now = lambda: asyncio.get_running_loop().time()
    load = Generator.load_weights

    async def load_weights(generator, manifest):
        await load(generator, manifest)
        loaded[manifest.version] = world.recorder.now()

    def evaluation(step, metrics, groups, waited_since):
        since[step] = waited_since

    monkeypatch.setattr(Generator, "load_weights", load_weights)
    monkeypatch.setattr(world.recorder, "evaluation", evaluation)
    run_virtually(world.run())
    assert since.keys() == {0, 1, 2}
    assert since[0] == 0  # before the first step nothing is a step's
    assert all(since[step] >= loaded[step] for step in (1, 2)), (since, loaded)
