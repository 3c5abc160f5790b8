"""Recorded batches: whatever a problem's metadata holds comes back."""

from dataclasses import dataclass, fields

from rl.controller.training_batch import Streamed, TrainingBatch, TrainingGroup
from rl.observability.batches import VERSION, has_batch, read_batch, write_batch
from rl.types import Group, Problem, Rewards, Rollout, Sample, Score, Segment, VersionRange

FIELDS = {
    TrainingBatch: "groups rollouts filtered means samples_per_unit streamed",
    TrainingGroup: "samples num_tokens num_sequences",
    Streamed: "groups learned",
    Group: "index rollouts scores",
    Rollout: "problem segments response stop versions forks messages score counts seconds turn_order",
    Segment: "tokens sampled logprobs",
    Score: "reward error parts components turn_components notes cause verdict",
    Rewards: "turns tokens",
    Sample: "tokens loss_mask generator_logprobs advantages weights loss_inputs id labels",
    Problem: "id question answer metadata messages task",
    VersionRange: "oldest newest",
}
"""Of version 1. Where a field comes, goes or is renamed, VERSION goes up by one, so that older files are refused."""


def test_what_is_pickled_is_as_its_version_says():
    assert VERSION == 1
    assert {kind: " ".join(field.name for field in fields(kind)) for kind in FIELDS} == FIELDS


def test_classes_and_functions_of_a_recipe_are_read_back_anywhere(tmp_path):
    @dataclass(frozen=True)
    class Local:  # as a class of a recipe's file is: no process can import it
        value: int

    write_batch(tmp_path, 1, {"metadata": Local(3), "function": lambda: Local(4)}, 0.5, 1)
    batch, coef = read_batch(tmp_path, 1)
    assert (batch["metadata"].value, batch["function"]().value, coef) == (3, 4, 0.5)
    write_batch(tmp_path, 2, None, 0.0, 1)
    assert has_batch(tmp_path, 2) and not has_batch(tmp_path, 1)


def test_a_run_that_goes_on_with_fewer_keeps_no_more(tmp_path):
    for step in range(1, 10):
        write_batch(tmp_path, step, None, 0.0, 5)
    (tmp_path / "batches" / "mine").touch()
    for step in (10, 11):
        write_batch(tmp_path, step, None, 0.0, 2)
    assert {path.name for path in (tmp_path / "batches").iterdir()} == {"step-10.pkl", "step-11.pkl", "mine"}
