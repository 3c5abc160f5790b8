"""Which checkpoint `--resume latest`, or `--resume` with a run's directory, means."""

from dataclasses import replace
from pathlib import Path

from rl.controller.config import RunConfig
from rl.errors import ConfigError
from rl.models.checkpoint_dir import latest


def with_newest_checkpoint(recipe: str, config: RunConfig) -> RunConfig:
    """The config with the checkpoint's own path. Raises ConfigError where there is none."""
    if config.resume == "latest":
        newest = [latest(run / "checkpoints") for run in Path("runs").glob(f"{recipe}-*")]
        found = max((path for path in newest if path), key=lambda p: p.stat().st_mtime, default=None)
        where = f"a run of {recipe} in runs/"
    elif config.resume and (Path(config.resume) / "checkpoints").is_dir():
        found, where = latest(Path(config.resume) / "checkpoints"), f"the run {config.resume}"
    else:
        return config
    if found is None:
        raise ConfigError(f"resume={config.resume!r}: {where} has no complete checkpoint; leave it out")
    return replace(config, resume=str(found))
