"""`rl replay` does a step of an earlier run again: the same numbers, and under another layout nearly so."""

import re

import pytest

from tests.integration.runs import rl


def differences(output):
    """Metric -> (recorded, replayed)."""
    rows = re.findall(r"^(\S+) +(\S+) +(\S+) +(\S+)$", output[output.index("step 4") :], re.MULTILINE)
    return {name: (float(before), float(now)) for name, before, now, _ in rows if name != "step"}


@pytest.mark.slow
def test_a_step_is_done_again_under_its_own_layout_and_another(tmp_path):
    run_dir = tmp_path / "run"
    done = rl("train", "tests/recipes.py:ppo_with_everything", "--run_dir", run_dir, "--record_batches", 3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(p.name for p in (run_dir / "batches").iterdir()) == [
        "step-2.pkl",
        "step-3.pkl",
        "step-4.pkl",
    ]
    again = rl("replay", run_dir, "--step", 4)
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"steps 3 to 4, from {run_dir}/checkpoints/step-2" in again.stdout
    found = differences(again.stdout)
    assert {"loss", "grad_norm", "entropy", "critic/loss", "critic/grad_norm", "lr"} <= found.keys()
    assert all(before == now for before, now in found.values()), found
    other = rl("replay", run_dir, "--step", 4, "--trainer.layout.shard", 2)
    assert other.returncode == 0, other.stderr[-3000:]
    for name, (before, now) in differences(other.stdout).items():
        if not name.startswith("tokens/"):  # how much is computed depends on the layout
            # holds: exact, the same step twice on one machine
            assert now == pytest.approx(before, rel=1e-3, abs=1e-5), name
    missing = rl("replay", run_dir, "--step", 1)
    assert missing.returncode == 2 and "no checkpoint before step 1 with the batches" in missing.stderr
