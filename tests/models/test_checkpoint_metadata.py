"""A checkpoint's metadata is a pickle: those of others may hold anything, and only what describes tensors is read."""

import io
import os
import pickle
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from rl.errors import DamagedCheckpoint
from rl.models.checkpoint_dir import tensor_names
from rl.models.checkpoint_metadata import CheckpointReader

TENSORS = {
    "model": {"w": {"value": torch.ones(2, 3), "step": torch.zeros(()), "exp_avg": torch.ones(2, dtype=torch.bfloat16)}},
    "rng.0.cpu": torch.arange(5, dtype=torch.uint8),
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
    dcp.save(TENSORS, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_what_torch_writes_is_read(checkpoint):
    assert tensor_names(checkpoint) == {"model.w.value", "model.w.step", "model.w.exp_avg", "rng.0.cpu"}
    with (checkpoint / ".metadata").open("rb") as file:
        assert CheckpointReader(checkpoint).read_metadata().state_dict_metadata == pickle.load(
            file
        ).state_dict_metadata  # fmt: skip
    empty = {"model": {"w": {key: torch.zeros_like(t) for key, t in TENSORS["model"]["w"].items()}}}
    dcp.load(empty, storage_reader=CheckpointReader(checkpoint), no_dist=True)
    assert torch.equal(empty["model"]["w"]["value"], torch.ones(2, 3))


def test_a_member_of_an_enum_is_read_as_any_python_writes_it():
    """Up to 3.11.3, as the attribute of its class."""
    member = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    written = Metadata({"a": Calls(getattr, _MEM_FORMAT_ENCODING, member.name)}, storage_data={})
    read = CheckpointReader.unpickled(io.BytesIO(pickle.dumps(written)))
    assert read.state_dict_metadata == {"a": member}


class Calls:
    """Calls `function` when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def by_name(module, name):
    """A pickle of a global by the protocol that takes dotted names."""
    return pickle.PROTO + b"\x04" + b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name)
    ) + pickle.STACK_GLOBAL + pickle.STOP  # fmt: skip


HOSTILE = {
    "a command": pickle.dumps(Calls(os.system, "touch harm")),
    "inside a metadata": pickle.dumps(Metadata({"a": Calls(os.mkdir, "harm")}, storage_data={})),
    "a builtin": pickle.dumps(Calls(eval, "__import__('os').mkdir('harm')")),
    "torch's own reader": pickle.dumps(Calls(torch.load, "harm")),
    "a module of torch": by_name("torch", "os"),
    "a path through a module": by_name("torch.serialization", "os.system"),
    "a path through a class": by_name("pathlib", "PosixPath.unlink"),
    "a path through an allowed module": by_name("torch.distributed.checkpoint.metadata", "os.system"),
    "a function of torch": by_name("torch", "save"),
    "what a function has": pickle.dumps(Calls(getattr, Metadata, "__init__")),
    "what an enum has": pickle.dumps(Calls(getattr, _MEM_FORMAT_ENCODING, "__class__")),
    "bytes, which torch would unpickle": pickle.dumps(
        Metadata({"a": BytesStorageMetadata()}, storage_data={})
    ),
    "no metadata": pickle.dumps({"a": 1}),
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_else_is_read_let_alone_called(checkpoint, monkeypatch, tmp_path, what):
    monkeypatch.chdir(tmp_path)
    (checkpoint / ".metadata").write_bytes(HOSTILE[what])
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata is broken"):
        tensor_names(checkpoint)
    assert not (tmp_path / "harm").exists()
    with pytest.raises(CheckpointException):  # torch logs it
        dcp.load({"a": torch.zeros(1)}, storage_reader=CheckpointReader(checkpoint), no_dist=True)
    assert not (tmp_path / "harm").exists()


def test_an_import_is_not_made_to_find_out(checkpoint, monkeypatch):
    found = []
    module = types.ModuleType("hostile_module")
    module.__getattr__ = lambda name: found.append(name)
    monkeypatch.setitem(sys.modules, "hostile_module", module)
    with pytest.raises(pickle.UnpicklingError, match="hostile_module.anything"):
        CheckpointReader(checkpoint).unpickled(io.BytesIO(by_name("hostile_module", "anything")))
    assert not found
