"""Recorded batches: whatever a problem's metadata holds comes back."""

from dataclasses import dataclass

from rl.observability.batches import has_batch, read_batch, write_batch


def test_classes_and_functions_of_a_recipe_are_read_back_anywhere(tmp_path):
    @dataclass(frozen=True)
    class Local:  # as a class of a recipe's file is: no process can import it
        value: int

    write_batch(tmp_path, 1, {"metadata": Local(3), "function": lambda: Local(4)}, 0.5, 1)
    batch, coef = read_batch(tmp_path, 1)
    assert (batch["metadata"].value, batch["function"]().value, coef) == (3, 4, 0.5)
    write_batch(tmp_path, 2, None, 0.0, 1)
    assert has_batch(tmp_path, 2) and not has_batch(tmp_path, 1)
