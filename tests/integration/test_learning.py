"""Recipes learn, from every seed, as the README promises. These runs have no deadline that other work on the same cores
could break: pytest-xdist deals them out beside the other tests with processes (../side_by_side.py)."""

import pytest

from tests.integration.runs import read_metrics, rl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_SECONDS = 1700  # three to five times what a run takes alone on two cores

_CALCULATORS = """
from dataclasses import replace
from configs.calculator import calculator
from rl.loss.advantages.reinforce_pp import ReinforcePP

def episode():
    return calculator()

def turns():
    return replace(calculator(), advantages=ReinforcePP())  # which reads them
"""


@pytest.mark.parametrize(("seed", "max_offpolicy_steps"), [(0, 0), (1, 1), (2, 4)])
def test_quickstart_learns(tmp_path, seed, max_offpolicy_steps):
    """Synchronously, and with rollouts that lag behind."""
    accuracies = _accuracies(
        _steps(tmp_path, "quickstart", "--seed", seed, "--max_offpolicy_steps", max_offpolicy_steps)
    )
    assert accuracies[0] <= 0.65  # holds: meaning, the accuracy before training
    # holds: meaning, the README promises it; seeds reach 0.95 and more
    assert accuracies[-1] >= 0.90


@pytest.mark.parametrize(("seed", "rewards"), [(0, "episode"), (1, "turns"), (2, "episode")])
def test_the_calculator_learns_to_use_its_tool(tmp_path, seed, rewards):
    """In two turns, by both ways of rewards; half of the recipe's steps: the curve is flat from the 20th on."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(_CALCULATORS)
    settings = ("--seed", seed, "--env.rewards", rewards, "--steps", 20)
    lines = _steps(tmp_path, f"{recipe}:{rewards}", *settings)
    accuracies = _accuracies(lines)
    # holds: meaning, the policy learns the task
    assert accuracies[0] < 0.3 and accuracies[-1] > 0.8, accuracies
    steps = [line for line in lines if "loss" in line]
    # Over whole episodes of several turns.
    # holds: meaning, tokens that were not sampled move logprobs by nats
    assert max(line["logprob_diff/max"] for line in steps) < 1e-4
    # holds: meaning, episodes have two turns
    assert steps[-1]["episode/turns"] > 1.8 and steps[-1]["reward/errors"] == 0


def _steps(directory, *recipe):
    """The metrics of each step of a run to its end."""
    done = rl("train", *recipe, "--run_dir", directory / "run", timeout=_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_metrics(directory / "run")


def _accuracies(lines):
    return [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
