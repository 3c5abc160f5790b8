"""The recipes in configs/: each can start, and does what its name says."""

import dataclasses
from dataclasses import replace

import pytest

from rl import cli
from rl.config import ReferenceConfig, WarmupConfig
from rl.config.recipes import load_recipe, recipe_names
from rl.config.validate import validate
from rl.models.sources import ModelDir
from tests.controller.fakes import run_fakes

QUICK = [
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_pp",
    "ppo",
    "sft",
    "dpo",
    "distillation",
    "quickstart",
]


def test_there_is_one_for_each_algorithm():
    assert set(QUICK) <= set(recipe_names())


def test_a_recipe_that_changes_the_directory_is_found_again(tmp_path, monkeypatch):
    """config.json names its file from where `rl train` was started."""
    started = []
    monkeypatch.setattr("rl.controller.run.run", lambda recipe, config, source, **_: started.append(source))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp").mkdir()
    code = "import os\nfrom rl.configs.quickstart import quickstart as of_ours\nos.chdir('exp')\n"
    (tmp_path / "exp" / "mine.py").write_text(f"{code}def mine(): return of_ours()\n")
    cli._dispatch(["train", "exp/mine.py"])
    assert started == [f"{tmp_path}/exp/mine.py:mine"]


@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_runs_through_the_loop(name, tmp_path):
    _, config = load_recipe(name)
    if name == "distillation":  # its teacher is made by another run
        assert config.reference.model == ModelDir("runs/sft/hf")
        assert validate(replace(config, reference=ReferenceConfig(model=config.model))) == []
    else:
        assert validate(config) == []
    config = replace(
        config, steps=2, prompts_per_step=4, warmup=replace(config.warmup, steps=min(2, config.warmup.steps))
    )
    _, recorder = run_fakes(config, tmp_path)
    assert set(recorder.steps) == {1, 2} and all(
        m["updates"] == config.algorithm.num_updates for m in recorder.steps.values()
    )


def test_all_rl_recipes_share_their_warm_start():
    """They are compared with each other: only the algorithm may differ."""
    algorithm = {
        "loss",
        "advantages",
        "loss_agg",
        "kl",
        "critic",
        "shaping",
        "minibatches",
        "resampling_rounds",
        "reference",
    }
    base = load_recipe("quickstart")[1]
    assert base.warmup != WarmupConfig()
    for name in QUICK[:8]:
        config = load_recipe(name)[1]
        for field in dataclasses.fields(config):
            assert field.name in algorithm or getattr(config, field.name) == getattr(base, field.name), (
                name,
                field.name,
            )
