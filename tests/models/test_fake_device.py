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
    ("models/titan.py", "torch.from_numpy(array).to(self.device)", "torch.from_numpy(array)"),
    ("models/loss_metrics.py", "values.detach().cpu().numpy()", "values.detach().numpy()"),
    ("models/attention.py", "torch.from_numpy(array).to(device)", "torch.from_numpy(array)"),
    ("models/loss_metrics.py", "torch.from_numpy(column).to(device)", "torch.from_numpy(column)"),
    ("models/hf_model.py", "torch.from_numpy(array).to(device)", "torch.from_numpy(array)"),
    ("models/hf_engine.py", "model.to(self.device)", "model.to('cpu')"),
    ("models/titan.py", "model.to_empty(device=self.device)", "model.to_empty(device='cpu')"),
    ("models/titan.py", "init_states(buffer_device=self.device)", "init_states(buffer_device='cpu')"),
    ("models/titan.py", "pack_documents(micro.positions, self.device)", "pack_documents(micro.positions, torch.device('cpu'))"),
    ("models/export.py", ".cpu().contiguous()", ".contiguous()"),
    ("models/lora.py", "_parameter(tensor.to(device), placement", "_parameter(tensor, placement"),
    ("loss/base.py", "values.new_zeros(num)", "__import__('torch').zeros(num)"),
    ("models/loss_metrics.py", "entropy = inputs.entropy.detach().sum()", "entropy = inputs.entropy.detach().sum().item()"),
]  # fmt: skip


def raised(base, slips):
    """For each of (file, what stands there, what is put there): what a copy of rl/ with that change raises.

    As fake_device.py prints it: "copy", "raised" and "of_device".
    """
    write_config(base / "model")
    copies = {}
    for number, (file, there, without) in enumerate(slips):
        home = base / str(number)
        shutil.copytree(ROOT / "rl", home / "rl", ignore=shutil.ignore_patterns("__pycache__"))
        text = (home / "rl" / file).read_text()
        assert there in text, f"{file} has no {there!r} any more; name another site"
        (home / "rl" / file).write_text(text.replace(there, without))
        copies[str(home)] = ["titan", "hf"] if there == without else ["hf" if "/hf_" in file else "titan"]
    job = base / "job.json"
    job.write_text(json.dumps({"copies": copies, "model": str(base / "model")}))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/models/fake_device.py"), str(job)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=base, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["copy"] for answer in answers] == list(copies)
    return answers


def test_every_verb_keeps_to_its_device(tmp_path):
    assert [answer["raised"] for answer in raised(tmp_path, [("models/engine.py", "", "")])] == [""]


@pytest.mark.slow
def test_each_tensor_on_the_wrong_device_is_noticed(tmp_path):
    for slip, answer in zip(SLIPS, raised(tmp_path, SLIPS), strict=True):
        assert answer["of_device"], (slip, answer["raised"])


@pytest.mark.slow
def test_an_error_that_is_not_of_a_device_is_not_taken_for_one(tmp_path):
    there = "torch.from_numpy(array).to(device)"
    (answer,) = raised(tmp_path, [("models/hf_model.py", there, "no_such_name(array).to(device)")])
    assert "NameError" in answer["raised"] and "device" in answer["raised"] and not answer["of_device"]
