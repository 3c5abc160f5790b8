"""Going on with a run: which checkpoint `--resume` means, and that only one run at a time has a directory."""

import os
from dataclasses import replace
from pathlib import Path

from rl.controller.config import RunConfig
from rl.models.checkpoint_dir import latest


def with_newest_checkpoint(recipe: str, config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config with the checkpoint's own path; without one, and with a line that says so, where none is.

    "latest" is the newest of run_dir, or none, where one is given; else of any run of the recipe.
    """
    if config.resume == "latest" and config.run_dir:
        own = latest(Path(config.run_dir) / "checkpoints")
        return replace(config, resume=str(own or "")), []
    if config.resume == "latest":
        newest = [latest(run / "checkpoints") for run in Path("runs").glob(f"{recipe}-*")]
        found = max((path for path in newest if path), key=lambda p: p.stat().st_mtime, default=None)
        where = f"a run of {recipe} in runs/"
    elif config.resume and os.path.isdir(os.path.join(config.resume, "checkpoints")):
        found, where = latest(Path(config.resume) / "checkpoints"), f"the run {config.resume}"
    else:
        return config, []
    if found is None:
        said = f"resume={config.resume!r}: {where} has no complete checkpoint; leave it out"
        return replace(config, resume=""), [said]
    return replace(config, resume=str(found)), []


def is_own(config: RunConfig) -> bool:
    """Whether the checkpoint that the run goes on from is in the run's own directory."""
    if not (config.resume and config.run_dir):
        return False
    return Path(config.resume).resolve().parent.parent == Path(config.run_dir).resolve()
