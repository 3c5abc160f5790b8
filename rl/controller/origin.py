"""The checkpoint of another run from which a run began, kept until the run has one of its own.

The other run goes on, and removes its older checkpoints. So its files are linked into origin/ of this run's
directory, laid out as a run's directory: that takes no room while the other has them, and survives it.
"""

import os
import shutil
from pathlib import Path

from rl.config.resume import DRAWN, home_of
from rl.errors import RunError
from rl.models.checkpoint_dir import (
    ORIGIN,
    REFERENCES,
    critic_path,
    is_complete,
    latest,
    read_record,
    reference_weights,
    why_damaged,
)
from rl.models.hf import WEIGHTS


def keep_origin(checkpoint: str, run_dir: Path) -> None:
    """Nothing where a file cannot be linked: it is on another disk, or the other run has just removed it."""
    source, kept = Path(checkpoint), run_dir / ORIGIN
    if is_complete(kept / "checkpoints" / source.name):
        return
    partial = kept.with_name(f"{ORIGIN}.partial")
    for left in (kept, partial):
        shutil.rmtree(left, ignore_errors=True)
    try:
        _link(source, partial / "checkpoints" / source.name)
        if critic_path(source).is_dir():
            _link(critic_path(source), partial / "critic_checkpoints" / source.name)
        _, noted = read_record(source)["state"].get("reference", ("", ""))
        if reference := reference_weights(source, noted):
            _link(Path(reference), partial / REFERENCES / Path(reference).name)
        for name in ("config.json", "plan.json", *(f"{path}/{WEIGHTS}" for path in DRAWN)):
            if (home_of(checkpoint) / name).is_file():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(home_of(checkpoint) / name, partial / name)
        if not why_damaged(partial / "checkpoints" / source.name):
            partial.rename(kept)
    except (OSError, RunError):
        pass
    shutil.rmtree(partial, ignore_errors=True)


def drop_origin(run_dir: Path) -> None:
    """Once the run has a checkpoint of its own."""
    if latest(run_dir / "checkpoints"):
        shutil.rmtree(run_dir / ORIGIN, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=os.link)
