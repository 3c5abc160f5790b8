"""Whole runs for benchmarks: started as a user starts them, with their metrics."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from rl.cluster.environment import engine_environment
from rl.cluster.machine import num_cores


def run(
    recipe: str,
    *settings: object,
    cores: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = ("rl.cli",),
) -> dict:
    """To its end. cores: log name of a process ("trainer", "generator-0") -> the core that it is kept on.

    program: the module that is run in the place of `rl`, and its first arguments.

    Returns `steps`, the metrics of each training step; `accuracy` by step; `seconds` in all; `output`.
    """
    # Not kept: a checkpoint of SmolLM2 takes 1.8 GB.
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", *program, "train", recipe, "--run_dir", run_dir, *settings]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(env or {}),
            )
            while process.poll() is None:
                if cores:
                    _pin(process.pid, run_dir, cores)
                time.sleep(0.5)
            output.seek(0)
            text = output.read()
        seconds = time.monotonic() - began
        if process.returncode:
            sys.exit(f"{recipe} failed:\n{text[-3000:]}")
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": [line for line in lines if "time/step" in line],
        "accuracy": {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line},
        "seconds": seconds,
        "output": text,
    }


def _pin(pid: int, run_dir: Path, cores: Mapping[str, int]) -> None:
    """Every thread of a process, and of what it starts later, on its core."""
    logs = {str((run_dir / "logs" / f"{name}.log").resolve()): core for name, core in cores.items()}
    try:
        for child in psutil.Process(pid).children():
            core = logs.get(os.path.realpath(f"/proc/{child.pid}/fd/1"))
            for thread in child.threads() if core is not None else ():
                os.sched_setaffinity(thread.id, {core})
    except (psutil.Error, OSError):  # it ended meanwhile
        pass


def as_trainer(**changes: str) -> None:
    """Start this benchmark again with the environment of a process that trains, unless it has it."""
    environment = engine_environment(num_cores()) | changes
    if not environment.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, os.environ | environment)


def median(steps: Iterable[Mapping[str, float]], name: str) -> float:
    return statistics.median(step.get(name, 0.0) for step in steps)
