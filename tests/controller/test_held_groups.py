"""Finished groups beside a checkpoint: what comes back, and when nothing does."""

import dataclasses
import logging
from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.config.learning import learning_of
from rl.config.recipes import load_recipe
from rl.config.scoring import fingerprint
from rl.controller.buffer import BufferState, Finished
from rl.controller.held_groups import read_prompts, write_prompts
from rl.models.sources import TinyQwen3
from rl.types import Problem, Rollout, Score
from tests.controller.test_buffer import group

STATE = BufferState(9, [7, 8], [Finished(7, 2, group(7, 2, "differ"))])


CONFIG = quickstart()


@pytest.fixture(autouse=True)
def scored_by():
    """Asked anew: other tests of this process may have loaded recipes, whose files count."""
    global SCORED_BY
    SCORED_BY = fingerprint(CONFIG)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoints" / "step-3"
    path.mkdir(parents=True)
    return path


def test_what_was_written_comes_back(checkpoint):
    prompts = write_prompts(checkpoint, STATE, SCORED_BY)
    assert read_prompts(str(checkpoint), prompts, SCORED_BY) == STATE


def test_metadata_may_have_a_class_of_the_recipes(checkpoint):
    class Shelf:
        books = 3

    made = group(7, 2, "differ")
    rollout = replace(made.rollouts[0], problem=Problem("7", "q", "a", {"shelf": Shelf()}))
    held = [Finished(7, 2, replace(made, rollouts=(rollout,) * 2))]
    prompts = write_prompts(checkpoint, BufferState(9, [7], held), SCORED_BY)
    (read,) = read_prompts(str(checkpoint), prompts, SCORED_BY).held
    assert read.group.rollouts[0].problem.metadata["shelf"].books == 3


@pytest.mark.parametrize(("kind", "error"), [(Score, None), (Score, "it failed"), (Rollout, None)])
def test_what_lacks_a_field_of_today_is_generated_again(checkpoint, caplog, monkeypatch, kind, error):
    """A pickle of a class with slots that had fewer of them loads without an error."""
    made = group(7, 2, "differ")
    scores = tuple(replace(score, error=error) for score in made.scores)
    state = BufferState(9, [7, 8], [Finished(7, 2, replace(made, scores=scores))])
    with monkeypatch.context() as earlier:
        *names, newest = [field.name for field in dataclasses.fields(kind)]
        earlier.setattr(kind, "__getstate__", lambda part: [getattr(part, name) for name in names])
        prompts = write_prompts(checkpoint, state, SCORED_BY)
    assert read_prompts(str(checkpoint), prompts, SCORED_BY) == BufferState(9, [7, 8])
    assert newest in caplog.text and "is generated again" in caplog.text


def test_without_a_file_or_for_another_run_prompts_are_started_again(checkpoint):
    prompts = write_prompts(checkpoint, STATE, SCORED_BY)
    assert read_prompts("", prompts, SCORED_BY) == BufferState(9, [7, 8])
    (checkpoint.parent.parent / "held" / "step-3.pkl").unlink()
    assert read_prompts(str(checkpoint), prompts, SCORED_BY) == BufferState(9, [7, 8])


@pytest.mark.parametrize("content", [b"", b"cut short", b"cos\nsystem\n(S'false'\ntR."])
def test_a_file_of_another_content_is_not_opened_and_named(checkpoint, content, caplog):
    prompts = write_prompts(checkpoint, STATE, SCORED_BY)
    (checkpoint.parent.parent / "held" / "step-3.pkl").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read_prompts(str(checkpoint), prompts, SCORED_BY) == BufferState(9, [7, 8])
    assert "held/step-3.pkl cannot be used (its content has changed)" in caplog.text


def test_files_go_with_their_checkpoints(checkpoint):
    names = ("step-1", "step-2.partial", "step-3")  # step 2 is still being written
    for name in names:
        (checkpoint.parent / name).mkdir(exist_ok=True)
    for step in (1, 2, 3):
        write_prompts(checkpoint.parent / f"step-{step}", STATE, SCORED_BY)
    (checkpoint.parent / "step-1").rmdir()
    write_prompts(checkpoint.parent / "step-4", STATE, SCORED_BY)
    left = sorted(path.name for path in (checkpoint.parent.parent / "held").iterdir())
    assert left == ["step-2.pkl", "step-3.pkl", "step-4.pkl"]


def test_groups_are_of_the_numbers_that_they_were_sampled_in_whatever_was_asked_for():
    """A run with dtype=fastest goes on on a machine of another kind."""
    fastest, bfloat16 = (replace(quickstart(), dtype=dtype) for dtype in ("fastest", "bfloat16"))
    here, there = (learning_of(fastest, dtype).scored_by for dtype in ("bfloat16", "float32"))
    assert here != there and here == learning_of(bfloat16, "bfloat16").scored_by


OTHER_SCORES = {
    "env.num_eval": 7,  # any field of the env: what it means is the env's own
    "env.max_new_tokens": 3,
    "reward.limit_seconds": 9.0,
    "judge.model": TinyQwen3("abc"),
    "judge.max_tokens": 99,
    "group_size": 3,
    "seed": 7,
    "max_seq_len": 99,
}
SAME_SCORES = {
    "trainer.lr": 0.5,
    "trainer.micro_batch_tokens": 4096,
    "steps": 7,
    "reward.num_procs": 3,
    "judge.num_replicas": 2,
    "save_every": 3,
}


@pytest.mark.parametrize("setting", [*OTHER_SCORES, *SAME_SCORES])
def test_groups_are_generated_again_where_anything_that_made_their_scores_differs(
    setting, checkpoint, caplog
):
    prompts = write_prompts(checkpoint, STATE, SCORED_BY)
    section, _, name = setting.rpartition(".")
    value = {**OTHER_SCORES, **SAME_SCORES}[setting]
    if section:
        name, value = section, replace(getattr(CONFIG, section), **{name: value})
    held = read_prompts(str(checkpoint), prompts, fingerprint(replace(CONFIG, **{name: value}))).held
    assert bool(held) == (setting in SAME_SCORES)
    assert ("scored under other settings" in caplog.text) == (setting in OTHER_SCORES)


def test_groups_are_generated_again_where_the_code_of_env_or_recipe_differs(checkpoint, tmp_path):
    recipe, helper = tmp_path / "a_recipe.py", tmp_path / "points_of_a_recipe.py"
    helper.write_text("POINTS = 1.0\n")
    recipe.write_text(
        "import points_of_a_recipe\nfrom configs.quickstart import *\n"
        "class Mine(SortLetters):\n    def reward(self, *_):\n        return points_of_a_recipe.POINTS\n"
        "def mine() -> RunConfig:\n    from dataclasses import replace\n"
        "    return replace(quickstart(), env=Mine())\n"
    )
    _, config = load_recipe(str(recipe))
    prompts = write_prompts(checkpoint, STATE, fingerprint(config))

    def held():
        return read_prompts(str(checkpoint), prompts, fingerprint(config)).held

    assert held()
    for file in (recipe, helper):
        before = file.read_text()
        file.write_text(before + "# another reward\n")
        assert not held()
        file.write_text(before)
    assert held()
    learning = learning_of(config)  # a run starts, and its code is edited while it goes on
    helper.write_text("POINTS = 2.0\n")
    prompts = write_prompts(checkpoint, STATE, learning.scored_by)
    assert not held()
    helper.write_text("POINTS = 1.0\n")
    assert held()
    del prompts["scored_by"]  # as an older version wrote it
    assert not held()
