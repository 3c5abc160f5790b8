"""Device discipline without a device: every verb runs on one that is not there, and each slip is noticed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_config

ROOT = Path(__file__).parent.parent.parent
# (file of rl/, what stands there, the same without its device)
SLIPS = [
    ("models/engine.py", "torch.from_numpy(array).to(self.device)", "torch.from_numpy(array)"),
    ("models/engine.py", "with_targets=True)[0].cpu().numpy()", "with_targets=True)[0].numpy()"),
    ("models/attention.py", "torch.from_numpy(array).to(device)", "torch.from_numpy(array)"),
    ("models/loss_metrics.py", "torch.from_numpy(column).to(device)", "torch.from_numpy(column)"),
    ("models/loss_metrics.py", "torch.as_tensor(value, dtype=torch.float32, device=self._device)",
     "torch.as_tensor(value, dtype=torch.float32)"),
    ("models/hf_engine.py", "torch.from_numpy(array).to(device)", "torch.from_numpy(array)"),
    ("models/hf_engine.py", "model.to(self.device)", "model.to('cpu')"),
    ("models/titan.py", "model.to_empty(device=self.device)", "model.to_empty(device='cpu')"),
    ("models/titan.py", "init_states(buffer_device=self.device)", "init_states(buffer_device='cpu')"),
    ("models/titan.py", "pack_documents(micro.positions, self.device)", "pack_documents(micro.positions, torch.device('cpu'))"),
    ("models/load_weights.py", "full.to(device, param.dtype)", "full.to(param.dtype)"),
    ("models/export.py", ".to(dtype).cpu().contiguous()", ".to(dtype).contiguous()"),
    ("models/lora.py", "_parameter(tensor.to(device), placement", "_parameter(tensor, placement"),
    ("loss/base.py", "values.new_zeros(num)", "torch.zeros(num)"),
]  # fmt: skip


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """(file, its change) -> what the copy of rl/ with it raised; None is rl/ as it is."""
    base = tmp_path_factory.mktemp("copies")
    write_config(base / "model")
    copies = {}
    for number, slip in enumerate([None, *SLIPS]):
        home = base / str(number)
        shutil.copytree(ROOT / "rl", home / "rl", ignore=shutil.ignore_patterns("__pycache__"))
        copies[str(home)] = slip
        if slip is not None:
            file, there, without = slip
            text = (home / "rl" / file).read_text()
            assert there in text, f"{file} has no {there!r} any more; name another site"
            (home / "rl" / file).write_text(text.replace(there, without))
    job = base / "job.json"
    job.write_text(json.dumps({"copies": list(copies), "model": str(base / "model")}))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/models/fake_device.py"), str(job)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=base, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {copies[answer["copy"]]: answer["raised"] for answer in map(json.loads, done.stdout.splitlines())}


def test_every_verb_keeps_to_its_device(raised):
    assert raised[None] == ""


@pytest.mark.parametrize("slip", SLIPS, ids=lambda slip: f"{slip[0]}-{slip[1][:40]}")
def test_a_tensor_on_the_wrong_device_is_noticed(raised, slip):
    assert any(word in raised[slip] for word in ("device", "on_host", "AssertionError")), raised[slip]
