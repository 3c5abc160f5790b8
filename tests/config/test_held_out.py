"""Held-out problems are made once, and again only to see that they stay the same; training never draws them."""

# holds: exact

import asyncio
import string
from dataclasses import replace

import pytest

from rl.config import WarmupConfig
from rl.config.env_rules import check_env
from rl.config.rehearsal import rehearse
from rl.config.validate import validate
from rl.configs.quickstart import quickstart
from rl.controller.check import check
from rl.controller.rollouts import Rollouts
from rl.envs.base import derive_seed, held_out
from rl.envs.mixture import Mixture
from rl.models.sources import TinyQwen3
from tests.config.counted import NUM_EVAL, Counted, Drawn, Few, OwnHeldOut, made
from tests.controller.test_rollouts import Sampler, score


def start_and_evaluate(env):
    """What a run does with its environment up to its second evaluation."""
    held_out.cache_clear()
    made.clear()
    config = replace(quickstart(), model=TinyQwen3(alphabet=string.printable), warmup=WarmupConfig(), env=env)
    assert validate(config) == []
    tokenizer = config.model.tokenizer()
    assert rehearse(config, tokenizer).problems == []
    rollouts = Rollouts(env, tokenizer, score, 2, 0, max_tokens=99)
    for _ in range(2):
        assert len(asyncio.run(rollouts.evaluate(Sampler()))) == len(held_out(env))


def test_an_own_eval_problems_is_called_once_and_once_to_compare():
    start_and_evaluate(OwnHeldOut())
    assert {made[seed] for seed in range(NUM_EVAL)} == {2}


@pytest.mark.parametrize("env", [Counted(), Mixture(tasks=(("a", Counted()), ("b", Counted(name="b"))))])
def test_held_out_problems_are_generated_once(env):
    start_and_evaluate(env)
    num_tasks = len(env.made_of)
    counts = [made[derive_seed("eval", i)] for i in range(NUM_EVAL)]
    assert counts[3:] == [num_tasks] * (NUM_EVAL - 3)
    assert max(counts) <= 4 * num_tasks  # a few are made again, to see that they stay the same


def test_rl_check_makes_them_no_more_often(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    held_out.cache_clear()
    made.clear()
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from rl.configs.quickstart import quickstart\n"
        "from rl.config import RunConfig, WarmupConfig\n"
        "from rl.models.sources import TinyQwen3\n"
        "from tests.config.counted import OwnHeldOut\n"
        "import string\n"
        "def f() -> RunConfig:\n"
        "    model = TinyQwen3(alphabet=string.printable)\n"
        "    return replace(quickstart(), model=model, warmup=WarmupConfig(), env=OwnHeldOut())\n"
    )
    assert check(["mine.py"]) == 0
    assert f"OwnHeldOut, {NUM_EVAL} held-out problems" in capsys.readouterr().out
    assert {made[seed] for seed in range(NUM_EVAL)} == {2}


def test_training_draws_no_problem_of_an_own_eval_problems():
    drawn = {Few().train_problem(seed).question for seed in range(200)}
    assert drawn == {"4", "5", "6", "7"}


def test_an_own_eval_problems_that_differs_each_time_is_refused():
    config = replace(quickstart(), warmup=WarmupConfig(), env=Drawn())
    (line,) = check_env(config)
    assert "eval_problems() or generate() makes another problem each time" in line
