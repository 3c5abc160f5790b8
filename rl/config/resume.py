"""Going on with a run: which checkpoint `--resume` means."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rl.config.codec import read_config, to_json, without_addresses
from rl.config.recipe_modules import split_name
from rl.config.run import RunConfig
from rl.config.settle import own_directory
from rl.errors import ConfigError, NewerVersion
from rl.fields import short
from rl.models.checkpoint_dir import ABANDONED, ORIGIN, critic_path, is_complete, newest_first, why_damaged
from rl.models.hf import WEIGHTS
from rl.models.sources import MODEL, ModelDir, ModelSource
from rl.paths import whole_file
from rl.plan.roles import ROLES, RoleName

_log = logging.getLogger(__name__)


def going_on(source: str, config: RunConfig) -> tuple[RunConfig, list[str], bool]:
    """(with the checkpoint's own path, why there is none, whether the run goes on in its directory).

    source: where the recipe is, as a run's config.json names it.
    """
    in_place = config.resume == "latest" and bool(config.run_dir)  # as a scheduler starts it, first or again
    config, missing = with_newest_checkpoint(source, config)
    return config, missing, in_place or is_own(config.resume, config.run_dir)


def with_newest_checkpoint(source: str, config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config with the checkpoint's own path; without one, and with a line that says so, where none is.

    "latest" is the newest of run_dir, where one is given, or what that run began from; else the newest of
    any run of the recipe.
    """
    needs_critic = config.algorithm.needs_critic
    config = replace(config, resume=whole(config.resume))
    if config.resume == "latest" and config.run_dir:
        checkpoint = newest_good(Path(config.run_dir), needs_critic)
        return replace(config, resume=str(checkpoint or origin_of(Path(config.run_dir)))), []
    if config.resume == "latest":
        recipe = Path(source).name.rpartition(":")[2]
        sources = {run: _written_in(run)[0] for run in Path("runs").glob(f"{recipe}-*")}
        runs = [run for run, of_run in sources.items() if _is_same_recipe(of_run, source)]
        newest = [newest_good(run, needs_critic) for run in runs]
        checkpoint = max((path for path in newest if path), key=lambda p: p.stat().st_mtime, default=None)
        where = f"a run of {recipe} in runs/"
        if not runs and (other := next((of_run for of_run in sources.values() if of_run), "")):
            where += f" (there are some of {other}, which can be named)"
    elif config.resume and os.path.isdir(os.path.join(config.resume, "checkpoints")):
        checkpoint, where = newest_good(Path(config.resume), needs_critic), f"the run {config.resume}"
    else:
        return config, []
    if checkpoint is None:
        problem = f"resume={config.resume!r}: {where} has no complete checkpoint; leave it out"
        return replace(config, resume=""), [problem]
    return replace(config, resume=str(checkpoint)), []


def began_from(run_dir: Path) -> str:
    """Another run's checkpoint, from which a run began; empty where there is none."""
    checkpoint = str(_written_in(run_dir)[1].get("resume", ""))
    return "" if is_own(checkpoint, run_dir) else checkpoint


def origin_of(run_dir: Path) -> str:
    """Where that checkpoint is: what the run keeps of it, as the other run may have removed it since."""
    began = began_from(run_dir)
    kept = run_dir / ORIGIN / "checkpoints" / Path(began).name
    return str(kept) if began and is_complete(kept) else began


def _is_same_recipe(one: str, other: str) -> bool:
    """Whether two sources are one, by whatever way to the file."""
    (path, function), (path_of_other, function_of_other) = split_name(one), split_name(other)
    same_file = os.path.realpath(path) == os.path.realpath(path_of_other)
    return same_file and function == function_of_other


def _written_in(run_dir: Path) -> tuple[str, Mapping[str, Any]]:
    """The recipe and the settings of a run's config.json; nothing where it cannot be read.

    Raises NewerVersion.
    """
    try:
        return read_config(str(run_dir))
    except NewerVersion:
        raise
    except ConfigError:
        return "", {}


def whole(path: str) -> str:
    """A checkpoint that is named from within its own directory has its run's path."""
    of_checkpoint = Path(path).name.startswith("step-") and Path(path).parent.name != "checkpoints"
    return os.path.abspath(path) if of_checkpoint and os.path.isdir(path) else path


def newest_good(run_dir: Path, needs_critic: bool) -> Path | None:
    """The newest checkpoint of a run whose files look good, the critic's where the run has one.

    Says which it passes over. What only reading every byte shows, loading it shows.
    """
    for path in newest_first(run_dir / "checkpoints"):
        damage = why_damaged(path)
        if needs_critic and critic_path(path).parent.is_dir():  # one that never had a critic is refused
            damage = damage or why_damaged(critic_path(path))
        if not damage:
            return path
        _log.warning("the checkpoint %s is passed over: %s", path, damage)
    return None


def changed_settings(config: RunConfig) -> list[str]:
    """What differs from the settings of the run whose checkpoint it goes on from, one line each.

    Empty where the checkpoint has no config.json beside it. One that cannot be read is named.
    """
    path = home_of(config.resume) / "config.json"
    if not config.resume or not path.exists():
        return []
    try:
        _, before = read_config(str(path))
    except ConfigError as error:
        return [f"what has changed since the checkpoint's run is not known: {error}"]
    old, new = (_leaves(without_addresses(settings)) for settings in (before, to_json(config)))
    names = [name for name in dict.fromkeys([*old, *new]) if name not in ("resume", "run_dir", "hosts")]
    return [
        f"changed since the checkpoint's run: {name} {_written(old, name)} -> {_written(new, name)}"
        + ", without effect: a warm-up comes before the first step" * name.startswith("warmup.")
        for name in names
        if name in new and old.get(name, _default(config, name)) != new[name]
    ]


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    """Of to_json's nested objects: section.field -> value."""
    leaves: dict[str, Any] = {}
    for name, value in data.items():
        path = f"{prefix}{name}"
        is_section = isinstance(value, Mapping) and "type" in value
        leaves |= _leaves(value, f"{path}.") if is_section else {path: value}
    return leaves


def _default(config: RunConfig, name: str) -> Any:
    """As it is written down: what an older run, which did not have the setting, did."""
    owner, _, field = name.rpartition(".")
    try:
        part = attrgetter(owner)(config) if owner else config
        default = part.__dataclass_fields__[field].default
    except (AttributeError, KeyError):  # of something that is written down otherwise
        return None
    return list(default) if isinstance(default, tuple) else default


def _written(leaves: Mapping[str, Any], name: str) -> str:
    return short(json.dumps(leaves[name], default=repr)) if name in leaves else "(its default)"


_COPIED_BYTES = 1 << 24
DRAWN: Mapping[RoleName, str] = {
    name: MODEL if name == "trainer" else f"{own_directory(name)}/{MODEL}"
    for name, role in ROLES.items()
    if name == "trainer" or role.model != "model"
}
"""Role -> where a run keeps its random weights: the policy's, and those of models of their own."""


def with_drawn_weights(config: RunConfig, run_dir: Path) -> RunConfig:
    """A run's config with the weights that the run drew, as directories: whoever loads them draws none.

    Unchanged where a model is a directory already, and where the run is of a version that kept none.
    """
    home = _home(run_dir)
    return config.with_models(lambda role, model: _as_directory(model, home / DRAWN[role]))


def take_over_weights(config: RunConfig, run_dir: Path) -> None:
    """A run that goes on from another's checkpoint has the weights that the other drew, and draws none."""
    for path in DRAWN.values() if config.resume else ():
        source = home_of(config.resume) / path / WEIGHTS
        target = run_dir / path / WEIGHTS
        if source.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as theirs, whole_file(target) as file:
                shutil.copyfileobj(theirs, file, _COPIED_BYTES)


def home_of(checkpoint: str) -> Path:
    """The directory of the run that wrote it."""
    return _home(Path(checkpoint).parent.parent)


def _home(run_dir: Path) -> Path:
    """The run's own directory, where this is an abandoned branch of it."""
    return run_dir.parent.parent if run_dir.parent.name == ABANDONED else run_dir


def _as_directory(model: ModelSource, path: Path) -> ModelSource:
    return ModelDir(str(path)) if model.random_weights and (path / WEIGHTS).is_file() else model


def is_own(checkpoint: str, run_dir: str | Path) -> bool:
    """Whether a checkpoint is one of the run that has this directory; not where either is empty."""
    if not (checkpoint and str(run_dir)):
        return False
    return Path(checkpoint).resolve().parent.parent == Path(run_dir).resolve()
