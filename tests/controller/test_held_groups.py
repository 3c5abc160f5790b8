"""Finished groups beside a checkpoint: what comes back, and when nothing does."""

import dataclasses
import logging
from dataclasses import replace

import pytest

from rl.controller.buffer import BufferState, Finished
from rl.controller.held_groups import read_prompts, write_prompts
from rl.types import Problem, Score
from tests.controller.test_buffer import group

STATE = BufferState(9, [7, 8], [Finished(7, 2, group(7, 2, "differ"))])


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoints" / "step-3"
    path.mkdir(parents=True)
    return path


def test_what_was_written_comes_back(checkpoint):
    prompts = write_prompts(checkpoint, STATE)
    assert read_prompts(str(checkpoint), prompts, is_own=True) == STATE


def test_metadata_may_have_a_class_of_the_recipes(checkpoint):
    class Shelf:
        books = 3

    made = group(7, 2, "differ")
    rollout = replace(made.rollouts[0], problem=Problem("7", "q", "a", {"shelf": Shelf()}))
    held = [Finished(7, 2, replace(made, rollouts=(rollout,) * 2))]
    prompts = write_prompts(checkpoint, BufferState(9, [7], held))
    (read,) = read_prompts(str(checkpoint), prompts, is_own=True).held
    assert read.group.rollouts[0].problem.metadata["shelf"].books == 3


@pytest.mark.parametrize("error", [None, "it failed"])
def test_what_lacks_a_field_of_today_is_generated_again(checkpoint, caplog, monkeypatch, error):
    """A pickle of a class with slots that had fewer of them loads without an error."""
    made = group(7, 2, "differ")
    scores = tuple(replace(score, error=error) for score in made.scores)
    state = BufferState(9, [7, 8], [Finished(7, 2, replace(made, scores=scores))])
    with monkeypatch.context() as earlier:
        names = [field.name for field in dataclasses.fields(Score)[:-1]]
        earlier.setattr(Score, "__getstate__", lambda score: [getattr(score, name) for name in names])
        prompts = write_prompts(checkpoint, state)
    assert read_prompts(str(checkpoint), prompts, is_own=True) == BufferState(9, [7, 8])
    assert "verdict" in caplog.text and "is generated again" in caplog.text


def test_without_a_file_or_for_another_run_prompts_are_started_again(checkpoint):
    prompts = write_prompts(checkpoint, STATE)
    assert read_prompts(str(checkpoint), prompts, is_own=False) == BufferState(9, [7, 8])
    (checkpoint.parent.parent / "held" / "step-3.pkl").unlink()
    assert read_prompts(str(checkpoint), prompts, is_own=True) == BufferState(9, [7, 8])


@pytest.mark.parametrize("content", [b"", b"cut short", b"cos\nsystem\n(S'false'\ntR."])
def test_a_file_of_another_content_is_not_opened_and_named(checkpoint, content, caplog):
    prompts = write_prompts(checkpoint, STATE)
    (checkpoint.parent.parent / "held" / "step-3.pkl").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read_prompts(str(checkpoint), prompts, is_own=True) == BufferState(9, [7, 8])
    assert "held/step-3.pkl cannot be used (its content has changed)" in caplog.text


def test_files_go_with_their_checkpoints(checkpoint):
    names = ("step-1", "step-2.partial", "step-3")  # step 2 is still being written
    for name in names:
        (checkpoint.parent / name).mkdir(exist_ok=True)
    for step in (1, 2, 3):
        write_prompts(checkpoint.parent / f"step-{step}", STATE)
    (checkpoint.parent / "step-1").rmdir()
    write_prompts(checkpoint.parent / "step-4", STATE)
    left = sorted(path.name for path in (checkpoint.parent.parent / "held").iterdir())
    assert left == ["step-2.pkl", "step-3.pkl", "step-4.pkl"]
