"""The quickstart learns, from every seed."""

import subprocess
import sys

import pytest

from tests.integration.runs import ROOT, read_metrics


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_learns(tmp_path, seed):
    run_dir = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "rl.cli",
        "train",
        "quickstart",
        "--run_dir",
        str(run_dir),
        "--seed",
        str(seed),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy = {m["step"]: m["eval/accuracy"] for m in read_metrics(run_dir) if "eval/accuracy" in m}
    assert accuracy[0] <= 0.65
    assert accuracy[max(accuracy)] >= 0.90
