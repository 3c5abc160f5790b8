"""What `rl plan` says of SmolLM2 against what its processes take."""

# holds: meaning, bytes that the plan leaves out are a larger share

import os
import time

import psutil
import pytest

from configs.smollm2 import smollm2
from rl.cluster.machine import has_bfloat16, num_cores
from rl.config.settle import settle
from rl.plan.cluster import Cluster, Host
from tests.devices import NUM_GPUS
from tests.integration.runs import start

GIB = 2**30
SHORT = ("--steps", 2, "--warmup.steps", 2, "--env.num_eval", 8)  # full batches: what a step takes at most


@pytest.mark.slow
@pytest.mark.skipif(NUM_GPUS > 0, reason="measures processes of a CPU")
def test_the_plan_is_within_15_percent_of_the_measured_peaks(tmp_path):
    """Of the first steps: oneDNN's cache of kernels grows with the shapes that a long run meets."""
    process = start("train", "smollm2", *SHORT, "--run_dir", tmp_path / "run")
    peaks: dict[str, int] = {}
    while process.poll() is None:
        for child in psutil.Process(process.pid).children():
            try:
                log = os.path.basename(os.path.realpath(f"/proc/{child.pid}/fd/1"))
                with open(f"/proc/{child.pid}/status") as file:
                    (line,) = [line for line in file if line.startswith("VmHWM")]
            except (OSError, ValueError):  # it ended meanwhile
                continue
            peaks[log] = max(peaks.get(log, 0), int(line.split()[1]) << 10)
        time.sleep(0.3)
    assert process.wait() == 0, process.stdout.read()
    plan = settle(smollm2(), cluster=Cluster((Host(num_cores(), 64.0, bfloat16=has_bfloat16()),)))
    for role, log in (("trainer", "trainer.log"), ("generator", "generator-0.log")):
        measured = peaks[log] / GIB
        assert plan.of(role)[0].processes[0].peak / GIB == pytest.approx(measured, rel=0.15), (role, measured)
