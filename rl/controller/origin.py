"""The checkpoint of another run from which a run began, kept until the run's end: its own may be damaged.

The other run goes on, and removes its older checkpoints. So its files are linked into origin/ of this run's
directory, laid out as a run's directory: that takes no room while the other has them, and survives it.
"""

import os
import shutil
from contextlib import suppress
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


def keep_origin(checkpoint: str, run_dir: Path) -> str:
    """Why it is not kept; empty where it is. No file of it is copied: it may be on another disk."""
    source, kept, why = Path(checkpoint), run_dir / ORIGIN, ""
    if is_complete(kept / "checkpoints" / source.name):
        return ""
    partial = kept.with_name(f"{ORIGIN}.partial")
    for left in (kept, partial):
        shutil.rmtree(left, ignore_errors=True)
    try:
        _link(source, partial / "checkpoints" / source.name)
        if critic_path(source).is_dir():
            _link(critic_path(source), partial / "critic_checkpoints" / source.name)
        _, noted = read_record(source)["state"].get("reference", ("", ""))
        reference = reference_weights(source, noted)
        if reference and Path(reference).is_dir():
            _link(Path(reference), partial / REFERENCES / Path(reference).name)
        for name in ("config.json", "plan.json", *(f"{path}/{WEIGHTS}" for path in DRAWN.values())):
            if (home_of(checkpoint) / name).is_file():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(home_of(checkpoint) / name, partial / name)
        if not (why := why_damaged(partial / "checkpoints" / source.name)):
            partial.rename(kept)
    except shutil.Error as error:  # of each file
        why = str(error.args[0][0][2])
    except (OSError, RunError) as error:
        why = str(error)
    shutil.rmtree(partial, ignore_errors=True)
    return why


def drop_origin(run_dir: Path) -> None:
    """At the run's end. It is whole or has another name."""
    kept, partial = run_dir / ORIGIN, run_dir / f"{ORIGIN}.partial"
    if not latest(run_dir / "checkpoints"):
        return
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):
        kept.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=os.link)
