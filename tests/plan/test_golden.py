"""Every recipe on stand-in hosts, with random changes: what it comes to, and what holds for whatever it comes to."""

# holds: meaning, rounding of sums of GiB is 1e-9

import json

import pytest

from rl.config.settle import NOT_STARTED
from rl.plan.cluster import USABLE
from rl.plan.memory import GIB
from rl.plan.types import PHASES, Plan
from tests.plan.changes import CLUSTERS, GOLDEN, cases, digest, models, recipes, result

RECIPES = recipes()
EXPECTED = json.loads(GOLDEN.read_text())
AS_GRPO = ("dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp")
"""Differ from grpo in what no Plan reads, but for the changes that are drawn for each."""


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    return models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in AS_GRPO else name for name in RECIPES],
)
def test_a_recipe_comes_to_what_it_came_to(name, sizes):
    """A change that is meant: `python -m tests.plan.changes`."""
    assert digest(name, RECIPES[name], sizes) == EXPECTED[name]


def test_each_recipe_that_is_not_there_needs_another_library():
    assert len(RECIPES) >= 20 and {*RECIPES} <= {*EXPECTED}


@pytest.mark.parametrize(
    ("count", "least"), [(30, 50), pytest.param(60, 100, marks=pytest.mark.slow)], ids=["30", "60"]
)
def test_what_holds_for_every_plan(sizes, count, least):
    """Each process has a place that is there; no GPU, in no phase, and no host has more than it holds."""
    plans = refusals = 0
    for hosts, there in CLUSTERS.items():
        for number, config in enumerate(cases(RECIPES["grpo"], hosts, sizes, count, "holds")):
            made = result(config, [*NOT_STARTED][number % 3], there)
            if not isinstance(made, Plan):
                refusals += 1
                assert all(problem.text.count("\n") == 0 and problem.text for problem in made)
                continue
            plans += 1
            _check(made)
    assert plans > least and refusals > least


def _check(plan: Plan) -> None:
    taken: dict[tuple, float] = {}
    for replica in plan.replicas:
        for process in replica.processes:
            assert process.host < len(plan.cluster.hosts) and process.threads >= 1
            assert {*process.gpus} <= {*range(len(plan.cluster.hosts[process.host].gpus))}
            for phase in process.memory:
                place = (process.host, *process.gpus, phase)
                taken[place] = taken.get(place, 0.0) + process.memory[phase].total / GIB
    for (host, *gpus, phase), gib in taken.items():
        there = plan.cluster.hosts[host]
        room = there.gpus[gpus[0]].gib * USABLE if gpus else there.free_gib
        assert gib <= room + 1e-9, (host, gpus, phase)
    assert [stay.phase for stay in plan.stays] == [*PHASES]
