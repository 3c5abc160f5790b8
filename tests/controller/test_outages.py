"""A generator that dies costs no episode its score: the wait for another is not the policy's slowness."""

# holds: exact

import asyncio
from dataclasses import replace

import pytest

from configs.calculator import calculator
from rl.causes import note_outage, noting_outages
from rl.config import WarmupConfig
from rl.waiting import Deadlines
from tests.controller.whole_run import World
from tests.virtual_time import run_virtually

RECIPE = calculator()
SETTINGS = replace(
    RECIPE,
    env=replace(RECIPE.env, episode_seconds=60.0, num_eval=2),
    warmup=WarmupConfig(),
    prompts_per_step=2,
    group_size=2,
    eval_every=9,
    max_logprob_diff=1e9,
    steps=3,
    deadlines=Deadlines(),
)


def run(directory, kill_after=None):
    """kill_after: seconds of the second step after which the generator dies. It starts in up to 200 s."""
    world = World(SETTINGS, directory, slow={"generator-0.ready": 2e4, "generator-0.sample": 200})

    async def main():
        running = asyncio.create_task(world.run())
        if kill_after is not None:
            while 1 not in world.recorder.steps:
                await asyncio.sleep(0.05)
            await asyncio.sleep(kill_after)
            world.kill("generator")
        await running

    run_virtually(main())
    return {
        step: {name: value for name, value in metrics.items() if name.startswith("reward/")}
        for step, metrics in world.recorder.steps.items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("kill_after", [1.0, 2.0, 3.5, 5.0, 7.0])
def test_episodes_whose_generator_died_have_the_scores_that_they_have_without(
    undisturbed, kill_after, tmp_path
):
    assert undisturbed.keys() >= {1, 2, 3}
    assert all(metrics["reward/errors"] == 0 for metrics in undisturbed.values())
    assert run(tmp_path, kill_after) == undisturbed


def test_an_outage_is_noted_for_the_one_that_waits():
    note_outage("nobody asked")
    outer, inner = [], []
    with noting_outages(outer):
        with noting_outages(inner):
            note_outage("a")
        note_outage("b")
    note_outage("nobody asks any more")
    assert (outer, inner) == (["b"], ["a"])
