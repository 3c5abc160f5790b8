"""What steps learned from, kept for `rl replay`: batches/step-N.pkl of a run."""

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from rl.errors import ConfigError, check_version
from rl.paths import whole_file

VERSION = 1
"""Of what is pickled: one more where a class in it changes."""


def write_batch(run_dir: Path, step: int, batch: Any, entropy_coef: float, keep_last: int) -> None:
    """batch: a TrainingBatch, before any update. Removes those that are older than the `keep_last` newest.

    Pickled into the file in small frames: other threads run in between.
    """
    with whole_file(_path(run_dir, step), durable=False) as file:
        pickle.dump(VERSION, file)
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


def check_batch(run_dir: Path, step: int) -> None:
    """Raises NewerVersion where it is of another version, and ConfigError where it is damaged."""
    with _path(run_dir, step).open("rb") as file:
        _check_version(file)


def read_batch(run_dir: Path, step: int) -> tuple[Any, float]:
    """Of a run of one's own: a pickle may do anything. Raises as `check_batch`."""
    with _path(run_dir, step).open("rb") as file:
        _check_version(file)
        batch, entropy_coef = _load(file)
    return batch, entropy_coef


def _check_version(file: BinaryIO) -> None:
    version = _load(file)
    check_version(file.name, version if isinstance(version, int) else 0, VERSION)  # the first ones had none


def _load(file: BinaryIO) -> Any:
    try:
        return pickle.load(file)
    except (pickle.UnpicklingError, EOFError) as error:
        raise ConfigError(f"{file.name} is damaged ({error}); replay a step without it") from None


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / "batches" / f"step-{step}.pkl"
