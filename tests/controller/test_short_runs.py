"""Short runs, warm-ups of pretrained weights, and settings that change on a resume."""

from dataclasses import replace
from functools import partial

import pytest

from configs.quickstart import quickstart
from rl.config import WarmupConfig
from rl.config.codec import write_config
from rl.config.defaults import warmup_lr
from rl.config.learning import LRSchedule
from rl.config.recipes import load_recipe, recipe_names
from rl.config.resume import changed_settings
from rl.controller import run as running
from rl.models.sources import ModelDir
from rl.observability.watches import LossWatch
from rl.types import LoRA


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup_steps", range(8))
@pytest.mark.parametrize("num_steps", range(3, 20))
def test_a_schedule_acts_in_every_run(kind, warmup_steps, num_steps):
    shares = [LRSchedule(kind, num_steps, warmup_steps, decay_ratio=0.5)(k + 1) for k in range(num_steps)]
    assert shares[-1] < 1 and max(shares) == 1
    top = shares.index(1)
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top:] == sorted(shares[top:], reverse=True)


@pytest.mark.parametrize(
    ("model", "rank", "expected"),
    [
        (quickstart().model, 0, 3e-3),
        (quickstart().model, 8, 3e-3),
        (ModelDir("x"), 0, 1e-4),
        (ModelDir("x"), 8, 5e-4),
    ],
)
def test_a_warm_ups_rate_suits_the_weights(model, rank, expected):
    trainer = replace(quickstart().trainer, lora=LoRA(rank=rank))
    config = replace(quickstart(), model=model, trainer=trainer, warmup=WarmupConfig(steps=3))
    assert warmup_lr(config)[0] == expected
    assert warmup_lr(replace(config, warmup=WarmupConfig(steps=3, lr=2e-3))) == (2e-3, "asked for")


def test_pretrained_weights_put_into_a_recipe_are_warmed_up_at_a_rate_of_theirs():
    """Who takes over a recipe with a model of theirs, as the README does: 3e-3 would destroy it."""
    configs = [load_recipe(name)[1] for name in recipe_names()]
    warmed = [config for config in configs if config.model.random_weights and config.warmup.steps]
    assert len(warmed) > 3 and {warmup_lr(config)[0] for config in warmed} == {3e-3}
    assert {warmup_lr(replace(config, model=ModelDir("theirs")))[0] for config in warmed} == {1e-4}


def said(losses):
    watch = LossWatch("warmup.lr")
    return [message for loss in losses if (message := watch.observe({"loss": loss}))]


def test_a_loss_that_rises_is_named_once():
    assert said([2.0, 1.5, 1.2, 1.0, 0.9, 0.95, 0.85, 1.0, 0.8]) == []
    assert said([5.0]) == [] and said([0.5, 2.0]) == []
    (message,) = said([0.6, 0.5, 0.7, 2.0, 4.0, 5.96, 6.0])
    assert "the loss rises" in message and "0.60 at best; lower warmup.lr" in message


def test_what_changed_on_a_resume_is_named(tmp_path):
    config = quickstart()
    write_config(tmp_path, "quickstart", config)
    checkpoint = str(tmp_path / "checkpoints" / "step-2")
    resumed = replace(config, resume=checkpoint, run_dir="elsewhere")
    assert changed_settings(resumed) == []
    resumed = replace(resumed, steps=7, trainer=replace(config.trainer, lr=0.5))
    assert changed_settings(resumed) == [
        "changed since the checkpoint's run: trainer.lr 0.0005 -> 0.5",
        "changed since the checkpoint's run: steps 100 -> 7",
    ]
    (line,) = changed_settings(replace(config, resume=checkpoint, warmup=replace(config.warmup, steps=99)))
    assert line.endswith("-> 99, without effect: a warm-up comes before the first step")
    assert changed_settings(replace(config, steps=7)) == []
    assert changed_settings(replace(resumed, resume=str(tmp_path / "other" / "checkpoints" / "step-2"))) == []


def test_a_run_with_one_evaluation_has_a_summary(tmp_path):
    """Such as one that begins behind its last step, in a directory with nothing but a checkpoint."""
    lines = running._summary({8: (0.5, 0.1)}, 25, tmp_path, tmp_path / "curve.png").splitlines()
    assert lines[1:3] == [
        "held-out accuracy at step 8: 0.500 +- 0.100",
        "held-out accuracy after 8 steps: 0.500 +- 0.100  (25 problems, greedy; +- standard error)",
    ]


def test_a_part_that_only_its_repr_tells_has_not_changed_by_being_elsewhere(tmp_path):
    """As in each process that starts the run again; its arguments and texts of any other setting count."""

    def weighted(of, weight, groups):
        return groups

    one, same, other = (partial(weighted, object(), weight) for weight in (0.5, 0.5, 0.25))
    config = replace(quickstart(), advantages=one)
    write_config(tmp_path, "quickstart", config)
    resumed = replace(config, resume=str(tmp_path / "checkpoints" / "step-2"))
    assert changed_settings(replace(resumed, advantages=same)) == []
    (line,) = changed_settings(replace(resumed, advantages=other))
    assert line.startswith("changed since the checkpoint's run: advantages ")
    named = replace(quickstart(), model=ModelDir("0x1"))
    write_config(tmp_path, "quickstart", named)
    assert changed_settings(replace(named, resume=resumed.resume, model=ModelDir("0x2")))
