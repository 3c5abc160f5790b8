"""What steps learned from, kept for `rl replay`: batches/step-N.pkl of a run."""

import pickle
from pathlib import Path
from typing import Any

import cloudpickle

from rl.paths import whole_file


def write_batch(run_dir: Path, step: int, batch: Any, entropy_coef: float, keep_last: int) -> None:
    """batch: a TrainingBatch, before any update. Removes those that are older than the `keep_last` newest.

    Pickled into the file in small frames: other threads run in between.
    """
    with whole_file(_path(run_dir, step), durable=False) as file:
        cloudpickle.dump((batch, entropy_coef), file)  # a problem's metadata may have classes of the recipe's
    kept = {_path(run_dir, number).name for number in range(step - keep_last + 1, step + 1)}
    for path in _path(run_dir, step).parent.glob("step-*.pkl"):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def forget_batches(run_dir: Path, step: int) -> None:
    """Of later steps, which happen again: `rl replay` would compare them with another life's metrics."""
    for path in (run_dir / "batches").glob("step-*.pkl"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > step:
            path.unlink()


def has_batch(run_dir: Path, step: int) -> bool:
    return _path(run_dir, step).is_file()


def read_batch(run_dir: Path, step: int) -> tuple[Any, float]:
    """Of a run of one's own: a pickle may do anything."""
    batch, entropy_coef = pickle.loads(_path(run_dir, step).read_bytes())
    return batch, entropy_coef


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / "batches" / f"step-{step}.pkl"
