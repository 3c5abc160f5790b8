"""Steps that a run no longer goes on from: abandoned/1, abandoned/2, ... in the run's directory.

Who goes on in place from an older step leaves the later ones behind. What the directory has of them is moved
there, never removed. Each is laid out as a run's directory, so that a new run can go on from its checkpoints.
"""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

from rl.models.checkpoint_dir import ABANDONED, RECORD, REFERENCES, finish_rename, remove
from rl.paths import sync

_PARTS = {
    "checkpoints": r"step-(\d+)",
    "critic_checkpoints": r"step-(\d+)",
    "held": r"step-(\d+)\.pkl",
    "batches": r"step-(\d+)\.pkl",
    "rollouts": r"(?:train|eval)-(\d+)\.jsonl\.gz",
}
"""What a run's directory has of single steps: where, and under which names.

Checkpoints are the first to move, the newest first: whoever was killed half-way goes on from one that has all
of its parts.
"""
_OF_ALL_STEPS = ("config.json", "metrics.jsonl", "rollouts.jsonl")
_WEIGHTS = r"model\.safetensors(\.[0-9a-f]{32})?\.partial"
_HALF_WRITTEN = {
    **{part: rf"{name}\.partial" for part, name in _PARTS.items() if not part.endswith("checkpoints")},
    "model": _WEIGHTS,
    "*/model": _WEIGHTS,  # of roles with a model of their own
    REFERENCES: r"step-.+-from-[0-9a-f]{8}\.partial",
}
"""What a run's directory has of files and copies that are not complete: where, and under which names."""


def abandon_after(run_dir: Path, step: int) -> str:
    """Move what a run has of steps after `step`, where it has a checkpoint of one. Says so; empty if not.

    Only the run that has locked the directory may call it, while none of its engines writes. Where it was
    killed half-way, the next call goes on with it.
    """
    target = _half_moved(run_dir)
    later = [number for number, _ in _steps(run_dir, "checkpoints") if number > step]
    if target is None and not later:
        return ""
    target = target or run_dir / ABANDONED / f"{_next_number(run_dir)}.partial"
    target.mkdir(parents=True, exist_ok=True)
    for name in _OF_ALL_STEPS:
        if (run_dir / name).is_file():
            shutil.copyfile(run_dir / name, target / name)
            sync(target / name)  # the run's own is then cut, for good
    for part in _PARTS:
        for number, path in reversed(_steps(run_dir, part)):
            if number > step:
                (target / part).mkdir(exist_ok=True)
                path.rename(target / part / path.name)
        if (target / part).is_dir():
            sync(target / part)
            sync(run_dir / part)
    sync(target)
    path = target.rename(target.with_suffix(""))
    sync(path.parent)
    sync(run_dir)
    names = ", ".join(f"step-{number}" for number, _ in _steps(path, "checkpoints"))
    return f"{names} of {run_dir} went to {path}"


def remove_unfinished(run_dir: Path) -> None:
    """Remove what the run's earlier life left half written, and a critic's checkpoint without a policy's.

    A checkpoint that is complete but for its name gets the name. Each is known by its own record. Only the
    run that has locked the directory may call it, while none of its engines writes.
    """
    for part in ("checkpoints", "critic_checkpoints"):
        for step, path in _own_partial(run_dir / part):
            if not path.name.endswith(".gone.partial"):
                finish_rename(run_dir / part / f"step-{step}")
        for _, path in _own_partial(run_dir / part):
            remove(path)
    half_moved = _half_moved(run_dir)  # critics' checkpoints follow
    homes = [run_dir, *([half_moved] if half_moved else [])]
    policies = {number for home in homes for number, _ in _steps(home, "checkpoints")}
    for number, path in _steps(run_dir, "critic_checkpoints"):
        if number > max(policies, default=-1) and _is_own(path, str(number)):
            remove(path)
    for part, name in _HALF_WRITTEN.items():
        for path in run_dir.glob(f"{part}/*.partial"):
            if re.fullmatch(name, path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _own_partial(directory: Path) -> list[tuple[str, Path]]:
    """Checkpoints of the run that have no name: being written, replaced or removed."""
    paths = directory.glob("*.partial")
    matches = ((re.fullmatch(r"step-(\d+)(?:\.old|\.gone)?\.partial", path.name), path) for path in paths)
    return [(match[1], path) for match, path in matches if match and _is_own(path, match[1])]


def _half_moved(run_dir: Path) -> Path | None:
    """The branch to which `abandon_after` was still moving when it was killed."""
    return next(iter((run_dir / ABANDONED).glob("*.partial")), None)


def abandoned(run_dir: Path) -> list[tuple[Path, list[int], int]]:
    """Each branch that a run has left: its directory, the steps of its checkpoints, its size in bytes."""
    branches = []
    for path in sorted((run_dir / ABANDONED).glob("*")):
        if path == _half_moved(run_dir):  # the next start of the run goes on with it
            continue
        size = 0
        for file in path.rglob("*"):
            with suppress(FileNotFoundError):
                size += file.stat().st_size if file.is_file() else 0
        branches.append((path, [number for number, _ in _steps(path, "checkpoints")], size))
    return branches


def _steps(run_dir: Path, part: str) -> list[tuple[int, Path]]:
    """The steps that a part of a directory has, in order."""
    matches = ((re.fullmatch(_PARTS[part], path.name), path) for path in (run_dir / part).glob("*"))
    return sorted((int(match[1]), path) for match, path in matches if match)


def _is_own(path: Path, step: str) -> bool:
    """Whether a run wrote it as that step's, or made it and wrote nothing yet."""
    if {file.name for file in path.iterdir()} <= {f"{RECORD}.partial"}:
        return True
    try:
        return json.loads((path / RECORD).read_text())["state"]["step"] == int(step)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _next_number(run_dir: Path) -> int:
    numbers = (path.name.removesuffix(".partial") for path in (run_dir / ABANDONED).glob("*"))
    return 1 + max((int(name) for name in numbers if name.isdecimal()), default=0)
