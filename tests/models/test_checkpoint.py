"""Checkpoints: complete or not there, readable under any layout, with all that the next step depends on."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.batching import pack, supervised_sample
from rl.errors import DamagedCheckpoint, RunError
from rl.loss.cross_entropy import CrossEntropy
from rl.models import checkpoint
from rl.models.build import ENGINES
from rl.models.checkpoint_dir import is_complete, latest, why_damaged
from rl.models.engine_config import EngineConfig
from rl.models.hf_engine import HFEngine
from rl.models.titan import TitanEngine
from rl.types import OptimParams
from tests.numeric import assert_close_as, exact_twin
from tests.tiny import write_config

BATCH = pack([supervised_sample([1, 2], np.arange(30)), supervised_sample([7], np.arange(9))])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("model"))


def learn(engine, steps=1):
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(BATCH, CrossEntropy())["loss:sum"])
        engine.optim_step(OptimParams(1e-3, 1 / 39))
    return losses


def work(mode, model_dir, directory, shard, tensor_parallel):
    arguments = [mode, model_dir, directory, shard, tensor_parallel]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(shard * tensor_parallel)]
    command += ["-m", "tests.models.checkpoint_worker", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    out = directory / f"{mode}-{shard}-{tensor_parallel}.json"
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.slow  # make test has kills of whole runs: tests/chaos
def test_killed_ranks_leave_the_last_complete_checkpoint_and_any_layout_goes_on_from_it(model_dir, tmp_path):
    expected = work("train", model_dir, tmp_path, 2, 1)
    # Killed while it wrote step-3, and keep_last=2 has removed step-0.
    assert (tmp_path / "lora" / "step-3.partial").is_dir()
    assert sorted(p.name for p in (tmp_path / "lora").iterdir() if is_complete(p)) == ["step-1", "step-2"]
    assert sorted(p.name for p in (tmp_path / "full").iterdir()) == ["step-1", "step-2"]
    assert work("resume", model_dir, tmp_path, 2, 1) == expected  # bit for bit
    for shard, tensor_parallel in ((1, 2), (1, 1)):
        got = work("resume", model_dir, tmp_path, shard, tensor_parallel)
        for kind in ("full", "lora"):
            assert got[kind]["first"] == expected[kind]["first"] == 3
            apart = np.abs(np.subtract(got[kind]["losses"], expected[kind]["losses"])).max()
            # holds: exact, layouts round the losses' sums apart by one unit in the last place; 32 are allowed
            assert apart <= 2.0**-18 * max(expected[kind]["losses"])


@pytest.mark.parametrize("kind", ENGINES)
def test_the_next_steps_are_the_same_bit_for_bit(model_dir, tmp_path, kind):
    engine = ENGINES[kind](model_dir, EngineConfig(seed=1))
    learn(engine, 2)
    engine.save(tmp_path / "step-2", {"next_step": 3, "schedule": [1, 2.5]}, wait=False)
    expected = learn(engine, 3)  # while it is written
    engine.wait_for_save()
    other = ENGINES[kind](model_dir, EngineConfig(seed=2))
    assert other.load(tmp_path / "step-2") == {"next_step": 3, "schedule": [1, 2.5]}
    assert learn(other, 3) == expected


def test_the_random_state_comes_back(tmp_path):
    """Dropout draws the same numbers after a restart, and others where the state is not restored."""
    engine = HFEngine(
        write_config(tmp_path / "model", "qwen2", attention_dropout=0.3), EngineConfig(seed=1, dropout=True)
    )
    learn(engine)
    engine.save(tmp_path / "step-1")
    expected = learn(engine, 2)
    engine.load(tmp_path / "step-1")
    assert learn(engine, 2) == expected
    engine.load(tmp_path / "step-1")
    torch.manual_seed(0)
    assert learn(engine, 2) != expected
    assert np.array_equal(engine.forward(BATCH)[0], engine.forward(BATCH)[0])  # no dropout without a gradient


def test_what_an_engine_of_one_kind_saved_the_other_goes_on_from(model_dir, tmp_path):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    with exact_twin(engine, tmp_path / "exact") as twin:
        exact = learn(twin, 5)[2:]
    learn(engine, 2)
    engine.save(tmp_path / "step-2")
    other = HFEngine(model_dir, EngineConfig(seed=2))
    other.load(tmp_path / "step-2")
    assert_close_as(learn(engine, 3), learn(other, 3), exact)


def test_a_failure_in_the_background_is_raised_and_the_previous_checkpoint_stays(
    model_dir, tmp_path, monkeypatch
):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    with pytest.raises(RunError, match="is not a complete checkpoint"):
        engine.load(tmp_path / "step-1")
    engine.save(tmp_path / "step-1")

    def full(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.FileSystemWriter, "write_data", full)
        engine.save(tmp_path / "step-2", wait=False)
        message = "could not be written: .*disk full.*the one before it is still there"
        with pytest.raises(RunError, match=message):
            engine.save(tmp_path / "step-3")
    assert latest(tmp_path) == tmp_path / "step-1"
    engine.save(tmp_path / "step-3")
    assert latest(tmp_path) == tmp_path / "step-3" and not (tmp_path / "step-2").exists()
    other = TitanEngine(write_config(tmp_path / "other", num_hidden_layers=3), EngineConfig(seed=1))
    with pytest.raises(RunError, match="does not fit this model"):
        other.load(tmp_path / "step-3")


def test_saving_again_under_the_same_name_replaces(model_dir, tmp_path):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    for step in (1, 2):
        engine.save(tmp_path / "latest-0", {"step": step})
    assert engine.load(tmp_path / "latest-0") == {"step": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["latest-0"]


def test_a_checkpoint_that_is_being_written_can_be_loaded(model_dir, tmp_path):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    for step in range(5):
        engine.save(tmp_path / f"step-{step}", {"step": step}, wait=False)
        assert engine.load(tmp_path / f"step-{step}") == {"step": step}


def test_a_byte_that_was_flipped_is_found_in_any_file_and_another_checkpoint_named(model_dir, tmp_path):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    for step in (1, 2, 3):
        engine.save(tmp_path / f"step-{step}", {"step": step})
    files = sorted(p for p in (tmp_path / "step-3").iterdir() if not p.name.startswith("checksums"))
    assert {p.name for p in files} == {".metadata", "record.json", "__0_0.distcp"}
    rng = np.random.default_rng(0)
    for path in files:
        good = path.read_bytes()
        for at in rng.integers(0, len(good), 4):
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
            with pytest.raises(DamagedCheckpoint, match="is broken") as error:
                engine.load(tmp_path / "step-3")
            assert str(path.parent) in str(error.value)
            assert str(error.value).endswith(f"go on with --resume {tmp_path / 'step-2'}")
        path.write_bytes(good)
    assert engine.load(tmp_path / "step-3") == {"step": 3}
    data = tmp_path / "step-2" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    files[0].write_bytes(b"")
    with pytest.raises(RunError, match=f"go on with --resume {tmp_path / 'step-1'}$"):  # step-2 is broken too
        engine.load(tmp_path / "step-3")


def test_each_file_that_is_missing_or_empty_is_damage_that_a_quick_look_finds(model_dir, tmp_path):
    """Checksums among them: without one the check would be off in silence."""
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    for step in (1, 2):
        engine.save(tmp_path / f"step-{step}", {"step": step})
    assert not why_damaged(tmp_path / "step-2")
    files = sorted(tmp_path.glob("step-2/*"))
    assert {p.name for p in files} == {
        ".metadata", "record.json", "__0_0.distcp", "checksums-0.json", "checksums-rest.json",
    }  # fmt: skip
    for path in files:
        for change in (
            path.unlink,
            lambda path=path: path.write_bytes(b""),
            lambda path=path: path.write_text("{}"),
        ):
            good = path.read_bytes()
            change()
            assert why_damaged(tmp_path / "step-2"), path
            with pytest.raises(DamagedCheckpoint, match=f"go on with --resume {tmp_path / 'step-1'}$"):
                engine.load(tmp_path / "step-2")
            assert latest(tmp_path) == tmp_path / "step-1"
            path.write_bytes(good)
    assert engine.load(tmp_path / "step-2") == {"step": 2}
    record = json.loads((tmp_path / "step-2" / "record.json").read_text())
    del record["checksums"]  # as an older version wrote it
    (tmp_path / "step-2" / "record.json").write_text(json.dumps(record))
    for sums in tmp_path.glob("step-2/checksums-*"):
        sums.unlink()
    assert engine.load(tmp_path / "step-2") == {"step": 2}


def test_files_and_names_are_on_the_disk_before_a_checkpoint_has_its_name(model_dir, tmp_path, monkeypatch):
    """What a machine that stops right after the rename would still have."""
    synced, at_rename = set(), []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def note_rename(path, target):
        if path.name == "step-1.partial":
            at_rename.extend([path, *path.iterdir()])
            assert not [p for p in at_rename if p.stat().st_ino not in synced]
            synced.discard(path.parent.stat().st_ino)
        return rename(path, target)

    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    engine.save(tmp_path / "run" / "checkpoints" / "step-1", {"step": 1})
    assert len(at_rename) == 6
    for directory in (tmp_path / "run" / "checkpoints", tmp_path / "run"):
        assert directory.stat().st_ino in synced


def test_writing_may_take_as_long_as_its_own_deadline_says(model_dir, tmp_path, monkeypatch):
    """Not as long as a step may."""
    write_data = checkpoint.FileSystemWriter.write_data

    def slow(*args):
        time.sleep(1.0)
        return write_data(*args)

    monkeypatch.setattr(checkpoint.FileSystemWriter, "write_data", slow)
    engine = TitanEngine(model_dir, EngineConfig(seed=1, timeout_seconds=0.3, save_seconds=60))
    engine.save(tmp_path / "step-1")
    assert is_complete(tmp_path / "step-1")
    engine = TitanEngine(model_dir, EngineConfig(seed=1, timeout_seconds=60, save_seconds=0.3))
    for _ in range(2):  # whoever comes back finds it still being written
        with pytest.raises(RunError, match="not be written in 0.3 s; raise deadlines.checkpoint"):
            engine.save(tmp_path / "step-2")
    time.sleep(1.5)


def test_a_gradient_from_before_a_load_is_no_part_of_the_next_step(model_dir, tmp_path):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    engine.save(tmp_path / "step-1")
    engine.forward_backward(BATCH, CrossEntropy())
    engine.load(tmp_path / "step-1")
    with pytest.raises(RunError, match="optim_step without a gradient"):
        engine.optim_step(OptimParams(1e-3))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"rng.0.cpu"}, set()),
        ({"rng.0.cpu", "rng.1.cpu"}, {"rng.1.cpu"}),
        ({"rng.0.cpu", "rng.1.cpu", "rng.2.cpu"}, set()),
        ({"rng.0.cpu", "rng.1.cpu", "rng.0.cuda", "rng.1.cuda"}, set()),
    ],
)
def test_the_random_state_is_asked_for_where_as_many_processes_saved_it(tmp_path, monkeypatch, saved, wanted):
    """This is the second of two."""
    monkeypatch.setattr(checkpoint.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(checkpoint, "tensor_names", lambda path: saved | {"model.w.value"})
    assert set(checkpoint.saved_rng_state(tmp_path, torch.device("cpu"))) == wanted
