"""Directories of checkpoints: which are complete, which is the latest, which go.

Free of torchtitan, because the controller reads them.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from rl.errors import RunError

RECORD = "record.json"
_log = logging.getLogger(__name__)


def read_record(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint. Raises RunError where there is none that is complete."""
    if not is_complete(path):
        raise RunError(f"{path} is not a complete checkpoint; give another, as runs/.../checkpoints/step-N")
    try:
        record = json.loads((path / RECORD).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path / RECORD} is broken ({error}); give another checkpoint") from error
    if not isinstance(record, dict):
        raise RunError(f"{path / RECORD} is broken: it is no object; give another checkpoint")
    return record


def write_checksums(path: Path, names: Iterable[str], of: str) -> None:
    """Of files of a checkpoint that is being written; `of`: which part of them, a rank's or the rest."""
    sums = {name: _checksum(path / name) for name in sorted(names)}
    (path / f"checksums-{of}.json").write_text(json.dumps(sums))


def check_content(path: Path, part: int = 0, num_parts: int = 1) -> None:
    """Raises RunError where a file is not what was written. Of `num_parts` processes each checks its part."""
    if broken := _broken(path, part, num_parts):
        raise RunError(f"{broken}; {_another(path)}")


def _broken(path: Path, part: int = 0, num_parts: int = 1) -> str:
    """What is wrong with a checkpoint's files; empty where nothing is."""
    wanted: dict[str, str] = {}
    for sums in sorted(path.glob("checksums-*.json")):  # none in a checkpoint of an older version
        try:
            wanted |= json.loads(sums.read_text())
        except (OSError, ValueError, TypeError) as error:
            return f"{sums} is broken ({error})"
    for name in sorted(wanted)[part::num_parts]:
        try:
            found = _checksum(path / name)
        except OSError as error:
            return f"{path / name} cannot be read ({error})"
        if found != wanted[name]:
            return f"{path / name} is broken: it is not what was written"
    return ""


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _another(path: Path) -> str:
    """The newest other checkpoint beside it that is good."""
    others = [p for p in path.parent.glob("*") if p != path and _number(p) >= 0 and is_complete(p)]
    good = (other for other in sorted(others, key=_number, reverse=True) if not _broken(other))
    newest = next(good, None)
    return f"go on with --resume {newest}" if newest else "there is no other good one beside it"


def tensor_names(path: Path) -> set[str]:
    return set(_metadata(path).state_dict_metadata)


def check_files(path: Path) -> None:
    """Raises RunError where a file of a checkpoint is missing or shorter than its metadata say."""
    ends: dict[str, int] = {}
    for part in (_metadata(path).storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        size = (path / name).stat().st_size if (path / name).is_file() else 0
        if size < end:
            raise RunError(f"{path / name} has {size} of {end} bytes; give another checkpoint")


def _metadata(path: Path) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:  # it is a pickle: anything may go wrong
        raise RunError(f"{path / '.metadata'} is broken ({error}); give another checkpoint") from error


def is_complete(path: str | Path) -> bool:
    path = Path(path)
    return not path.name.endswith(".partial") and (path / ".metadata").is_file() and (path / RECORD).is_file()


def latest(directory: str | Path) -> Path | None:
    """The complete checkpoint with the highest number at the end of its name."""
    complete = [path for path in Path(directory).glob("*") if _number(path) >= 0 and is_complete(path)]
    return max(complete, key=_number, default=None)


def _number(path: Path) -> int:
    """At the end of its name; -1 where there is none."""
    match = re.fullmatch(r".*?(\d+)", path.name)
    return int(match[1]) if match else -1


def rename(partial: Path, path: Path) -> None:
    """Give a complete checkpoint its name, in the place of one that has it."""
    old = path.with_name(path.name + ".old.partial")
    shutil.rmtree(old, ignore_errors=True)  # of a process that died here
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def prune(path: Path, keep_last: int) -> None:
    """Keep `path` and the newest others of its kind, `keep_last` in all; 0 keeps all."""
    if not keep_last or _number(path) < 0:
        return
    kind = path.name.rstrip("0123456789")
    same_kind = [p for p in path.parent.glob(f"{kind}*") if p.name.removeprefix(kind).isdigit()]
    others = sorted((p for p in same_kind if p != path), key=_number)
    for old in others[: max(0, len(others) - (keep_last - 1))]:
        # Under another name first: a directory is whole or does not look like a checkpoint.
        gone = old.with_name(old.name + ".old.partial")
        try:
            shutil.rmtree(old.rename(gone))
        except OSError as error:
            _log.warning("the old checkpoint %s could not be removed: %s", old, error)
