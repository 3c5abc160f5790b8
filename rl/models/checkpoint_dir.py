"""Directories of checkpoints: which are complete, which is the latest, which go.

Free of torchtitan, because the controller reads them.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.errors import DamagedCheckpoint, RunError, check_version
from rl.paths import sync, write_whole

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

RECORD = "record.json"
VERSION = 1
"""Of a record, and of what it stands for."""
OF_THE_REST = "rest"
ABANDONED = "abandoned"
"""In a run's directory: the branches that it has left, each laid out as a run's directory."""
ORIGIN = "origin"
"""In a run's directory: what it keeps of another run's checkpoint from which it began, laid out likewise."""
REFERENCES = "reference"
"""In a run's directory: the weights that references had."""
_log = logging.getLogger(__name__)


def read_record(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint. Raises RunError where there is none that is complete.

    As all that reads a record, ConfigError where it is of an unknown version: it is not damaged, and what is
    older must not be taken in its place.
    """
    if not is_complete(path):
        raise RunError(f"{path} is not a complete checkpoint; give another, as runs/.../checkpoints/step-N")
    return _record(path)


def reference_weights(path: Path, noted: str) -> str:
    """Where the reference's weights are that a checkpoint notes: beside it, also where its run was moved."""
    if not noted:
        return ""
    run_dir = path.resolve().parent.parent
    for home in (run_dir, run_dir.parent.parent):  # the second where it is of an abandoned branch
        if (home / REFERENCES / Path(noted).name).is_dir():
            return str(home / REFERENCES / Path(noted).name)
    return noted


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / RECORD).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path / RECORD} is broken ({error}); give another checkpoint") from error
    if not isinstance(record, dict):
        raise DamagedCheckpoint(f"{path / RECORD} is broken: it is no object; give another checkpoint")
    check_version(path / RECORD, record.get("version", VERSION), VERSION)  # the first ones had none
    return record


def checksum_files(num_ranks: int) -> list[str]:
    """What a record lists as `checksums`: a file of each rank that writes, and one of what rank 0 adds."""
    return [*(_checksum_file(str(rank)) for rank in range(num_ranks)), _checksum_file(OF_THE_REST)]


def _checksum_file(of: str) -> str:
    return f"checksums-{of}.json"


def write_checksums(path: Path, names: Iterable[str], of: str) -> None:
    """Of files of a checkpoint that is being written; `of`: which part of them, a rank's or the rest."""
    sums = {name: _checksum(path / name) for name in sorted(names)}
    write_whole(path / _checksum_file(of), json.dumps(sums).encode())


def why_damaged(path: Path) -> str:
    """Quick, for checkpoints of any size: record and metadata, and whether each file is as long as they say.

    Returns what is wrong; empty where nothing is, or where only `check_content` would find it.
    """
    if not is_complete(path):
        return f"{path} is not a complete checkpoint"
    return _why_damaged(path)


def _why_damaged(path: Path) -> str:
    """Of a checkpoint under any name."""
    try:
        sums = _checksums(path)
        small = {name: sums[name] for name in (RECORD, ".metadata") if name in sums}
        if changed := _why_changed(path, small):
            return changed
        ends = _sizes(path)
    except RunError as error:
        return str(error).split("; give another")[0]
    for name, end in ends.items():
        size = (path / name).stat().st_size if (path / name).is_file() else 0
        if size < end:
            return f"{path / name} has {size} of {end} bytes"
    if sums and (unknown := sorted({RECORD, ".metadata", *ends} - sums.keys())):
        return f"{path} has no checksum of its {unknown[0]}"
    return ""


def check_content(path: Path, part: int = 0, num_parts: int = 1) -> None:
    """Every byte, once, by the processes that load it: of `num_parts` of them each checks its part.

    Raises DamagedCheckpoint where a file is not what was written.
    """
    damage = why_damaged(path)
    if not damage:
        sums = _checksums(path)
        damage = _why_changed(path, {name: sums[name] for name in sorted(sums)[part::num_parts]})
    if damage:
        raise DamagedCheckpoint(f"{damage}; {another(path)}")


def _why_changed(path: Path, sums: Mapping[str, str]) -> str:
    for name, checksum in sums.items():
        try:
            if _checksum(path / name) != checksum:
                return f"{path / name} is broken: it is not what was written"
        except OSError as error:
            return f"{path / name} cannot be read ({error})"
    return ""


def _checksums(path: Path) -> dict[str, str]:
    """Of every file; of those that are there, or none, in a checkpoint of a version that did not list them.

    Raises DamagedCheckpoint where a file of them is missing or broken.
    """
    names = _record(path).get("checksums")
    files = sorted(path.glob(_checksum_file("*"))) if names is None else [path / name for name in names]
    sums: dict[str, str] = {}
    for file in files:
        try:
            sums |= json.loads(file.read_text())
        except (OSError, ValueError, TypeError) as error:
            raise DamagedCheckpoint(f"{file} is broken ({error}); give another checkpoint") from error
    return sums


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def another(path: Path) -> str:
    """The newest other checkpoint beside it that looks good."""
    newest = next((p for p in newest_first(path.parent) if p != path and not why_damaged(p)), None)
    return f"go on with --resume {newest}" if newest else "there is no other good one beside it"


def tensor_names(path: Path) -> set[str]:
    return set(_metadata(path).state_dict_metadata)


def _sizes(path: Path) -> dict[str, int]:
    """File -> bytes that it has at least, by the metadata. Raises DamagedCheckpoint where they are broken."""
    ends: dict[str, int] = {}
    for part in (_metadata(path).storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    return ends


def _metadata(path: Path) -> "Metadata":
    from rl.models.checkpoint_metadata import CheckpointReader  # over half a second

    try:
        return CheckpointReader(path).read_metadata()
    except Exception as error:  # it is a pickle: anything may go wrong
        broken = f"{path / '.metadata'} is broken ({error})"
        raise DamagedCheckpoint(f"{broken}; give another checkpoint") from error


def critic_path(path: Path) -> Path:
    """The critic's checkpoint beside the policy's."""
    return path.parent.with_name("critic_checkpoints") / path.name


def is_complete(path: str | Path) -> bool:
    path = Path(path)
    return not path.name.endswith(".partial") and (path / ".metadata").is_file() and (path / RECORD).is_file()


def latest(directory: str | Path) -> Path | None:
    """The checkpoint of the highest step, of those that look good."""
    return next((path for path in newest_first(Path(directory)) if not why_damaged(path)), None)


def newest_first(directory: Path) -> list[Path]:
    """A run's complete checkpoints. What has another name than step-N is somebody's own."""
    complete = [path for path in directory.glob("step-*") if path.name[5:].isdecimal() and is_complete(path)]
    return sorted(complete, key=_number, reverse=True)


def _number(path: Path) -> int:
    """At the end of its name; -1 where there is none."""
    match = re.fullmatch(r".*?(\d+)", path.name)
    return int(match[1]) if match else -1


def begin(partial: Path, record: Mapping[str, Any]) -> None:
    """Make the directory into which a checkpoint is written, in the place of one that is half written."""
    remove(partial)
    partial.mkdir(parents=True)
    sync(partial.parent.parent)  # a run's first checkpoint makes its directory too
    write_whole(partial / RECORD, json.dumps(record).encode())


def complete(partial: Path, path: Path, keep_last: int) -> None:
    """All files are there, and the metadata: it gets its name, and older ones go (`prune`)."""
    write_checksums(partial, (RECORD, ".metadata"), OF_THE_REST)
    rename(partial, path)
    prune(path, keep_last)


def rename(partial: Path, path: Path) -> None:
    """Give a complete checkpoint its name, in the place of one that has it.

    Its files are on the disk by then, each synced by who wrote it: so a name is never without them.
    """
    old = _old(path)
    remove(old)  # of a process that was killed here
    sync(partial)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    sync(path.parent)
    _try_to_remove(old)


def finish_rename(path: Path) -> None:
    """Give a checkpoint the name that it lacks: its process was killed right before `rename` gave it.

    Of two complete copies the newer one has it then. Only where no other process writes there.
    """
    for copy in (_partial(path), _old(path)):
        if not path.exists() and copy.exists() and not _why_damaged(copy):
            sync(copy)
            copy.rename(path)
            sync(path.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint, if it is there. Who is killed here leaves one that is incomplete and has a record.

    The record, by which a run knows its own, goes last.
    """
    if not path.exists():
        return
    (path / ".metadata").unlink(missing_ok=True)
    for file in path.iterdir():
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        elif file.name != RECORD:
            file.unlink()
    shutil.rmtree(path)


def _try_to_remove(old: Path) -> None:
    try:
        remove(old)
    except OSError as error:
        _log.warning("the old checkpoint %s could not be removed: %s", old, error)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _old(path: Path) -> Path:
    """Where a checkpoint is while another one takes its name."""
    return path.with_name(path.name + ".old.partial")


def prune(path: Path, keep_last: int) -> None:
    """Keep `path` and the newest others of its kind, `keep_last` in all; 0 keeps all."""
    if not keep_last or _number(path) < 0:
        return
    kind = path.name.rstrip("0123456789")
    named_so = (p for p in path.parent.glob(f"{kind}*") if p.name.removeprefix(kind).isdigit())
    same_kind = [p for p in named_so if is_complete(p)]  # else it is somebody's own
    candidates = sorted((p for p in same_kind if p != path), key=_number)
    for old in candidates[: max(0, len(candidates) - (keep_last - 1))]:
        # Under another name first: a directory is whole or does not look like a checkpoint.
        gone = old.with_name(old.name + ".gone.partial")
        try:
            old.rename(gone)
        except OSError as error:
            _log.warning("the old checkpoint %s could not be removed: %s", old, error)
        else:
            _try_to_remove(gone)
