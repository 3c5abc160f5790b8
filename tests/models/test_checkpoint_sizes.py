"""A checkpoint's files are as long as its metadata says, or it is damaged: looked at before any process starts."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rl.errors import DamagedCheckpoint
from rl.models.checkpoint_dir import (
    OF_THE_REST,
    RECORD,
    check_content,
    checksum_files,
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
