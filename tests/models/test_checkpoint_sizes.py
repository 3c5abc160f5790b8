"""A checkpoint's files are as long as its metadata says, or it is damaged: looked at before any process starts."""

import hashlib
import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from rl.errors import ConfigError, DamagedCheckpoint
from rl.models.checkpoint_dir import (
    OF_THE_REST,
    RECORD,
    check_content,
    checksum_files,
    latest,
    newest_first,
    prune,
    rename,
    why_damaged,
    write_checksums,
)


@pytest.fixture
def checkpoint(tmp_path):
    """Of one rank, with the record and the checksums that a run leaves."""
    path = tmp_path / "step-3"
    dcp.save({"model": {"w": {"value": torch.arange(100.0)}}}, checkpoint_id=path, no_dist=True)
    data = next(path.glob("*.distcp"))
    record = {"state": {}, "adapters": {}, "checksums": checksum_files(1)}
    (path / RECORD).write_text(json.dumps(record))
    write_checksums(path, [data.name], "0")
    write_checksums(path, [RECORD, ".metadata"], OF_THE_REST)
    return path, data


def test_a_checkpoint_with_all_its_bytes_is_whole(checkpoint):
    path, _ = checkpoint
    assert why_damaged(path) == ""
    check_content(path)


@pytest.mark.parametrize("cut", [1, 10**6])
def test_a_file_that_lacks_a_byte_is_named_with_both_sizes(checkpoint, cut):
    path, data = checkpoint
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[: max(0, size - cut)])
    assert why_damaged(path).startswith(f"{data} has {max(0, size - cut)} of ")
    with pytest.raises(DamagedCheckpoint, match=f"has {max(0, size - cut)} of "):
        check_content(path)


@pytest.mark.parametrize("name", [RECORD, ".metadata"])
def test_a_small_file_that_was_changed_is_found_by_the_quick_look(checkpoint, name):
    """Its length is the same, and what it says can be read."""
    path, _ = checkpoint
    content = (path / name).read_bytes()
    changed = content.replace(b'"state": {}', b'"state" :{}') if name == RECORD else content + b"\n"
    assert changed != content
    (path / name).write_bytes(changed)
    assert why_damaged(path) == f"{path / name} is broken: it is not what was written"


def test_a_checkpoint_that_takes_anothers_name_leaves_nothing_of_it(checkpoint):
    path, data = checkpoint
    new = path.with_name("step-3.partial")
    shutil.copytree(path, new)
    (new / "new").touch()
    rename(new, path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert (path / "new").exists() and (path / data.name).exists()


def test_a_checkpoint_as_the_first_version_writes_it_is_whole(tmp_path):
    """Word for word: whatever changes here, those that are there have to be loaded."""
    path = tmp_path / "step-3"
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    record = '{"version": 1, "state": {}, "checksums": ["checksums-0.json", "checksums-rest.json"]}'
    (path / "record.json").write_text(record)
    sums = {
        name: hashlib.blake2b((path / name).read_bytes(), digest_size=16).hexdigest()
        for name in (".metadata", "record.json")
    }
    (path / "checksums-0.json").write_text("{}")
    (path / "checksums-rest.json").write_text(json.dumps(sums))
    assert why_damaged(path) == ""
    check_content(path)
    (path / "record.json").write_text(record.replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match="record.json has version 2, and this rl reads 1"):
        why_damaged(path)


def test_a_changed_byte_of_the_tensors_is_found_by_whoever_reads_that_part(checkpoint):
    path, data = checkpoint
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert why_damaged(path) == ""
    with pytest.raises(DamagedCheckpoint, match=f"{data} is broken: .*; there is no other good one"):
        check_content(path)

    def finds(part):
        try:
            check_content(path, part, 2)
        except DamagedCheckpoint:
            return True
        return False

    assert sum(map(finds, range(2))) == 1


def test_the_newest_good_one_beside_a_damaged_checkpoint_is_named(checkpoint):
    path, data = checkpoint
    for name in ("step-1", "step-9", "step-10"):
        shutil.copytree(path, path.with_name(name))
    data.unlink()
    (path.with_name("step-10") / data.name).write_bytes(b"")
    good = path.with_name("step-9")
    with pytest.raises(DamagedCheckpoint, match=f"{data} has 0 of .*; go on with --resume {good}$"):
        check_content(path)
    assert [path.name for path in newest_first(path.parent)] == ["step-10", "step-9", "step-3", "step-1"]
    assert latest(path.parent) == good


def test_a_file_without_a_checksum_and_a_checksum_without_its_file_are_damage(checkpoint):
    path, data = checkpoint
    write_checksums(path, [], "0")
    assert why_damaged(path) == f"{path} has no checksum of its {data.name}"
    (path / "extra").write_bytes(b"of a rank")
    write_checksums(path, [data.name, "extra"], "0")
    check_content(path)
    (path / "extra").unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{path / 'extra'} cannot be read"):
        check_content(path)


def test_a_checkpoint_gets_its_name_though_an_old_copy_was_left(checkpoint):
    path, _ = checkpoint
    for name in ("step-3.partial", "step-3.old.partial"):
        shutil.copytree(path, path.with_name(name))
    rename(path.with_name("step-3.partial"), path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_the_oldest_steps_go_by_their_numbers(checkpoint):
    path, _ = checkpoint
    for name in ("step-8", "step-9", "step-10", "step-11", "mine"):
        shutil.copytree(path, path.with_name(name))
    prune(path.with_name("step-11"), 3)
    left = sorted(entry.name for entry in path.parent.iterdir())
    assert left == ["mine", "step-10", "step-11", "step-9"]
