"""What changes of the weights in a step, and how long it takes to another host: `python -m benchmarks.weight_delta [--write]`.

SmolLM2-135M-Instruct in bfloat16 learns its task, the trainer on one host and the generator on another (tests/hosts/namespaces.py).
The link carries 0.1, 1 or 10 Gbit/s (tc tbf). Needs root, `make tasks` and `rl fetch smollm2`.
"""

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.pages import Rows, machine, spread, write_page
from rl.weight_sync import delta
from tests.hosts.namespaces import Host
from tests.hosts.runs import numbers, train, two_hosts
from tests.integration.runs import read_metrics

RUNS = (
    ("1 Gbit/s", "1e-6", "on"),
    ("1 Gbit/s", "1e-5", "on"),
    ("1 Gbit/s", "1e-4", "on"),
    ("1 Gbit/s", "1e-5", "off"),
    ("0.1 Gbit/s", "1e-5", "on"),
    ("0.1 Gbit/s", "1e-5", "off"),
    ("10 Gbit/s", "1e-5", "on"),
    ("10 Gbit/s", "1e-5", "off"),
)
"""Link, learning rate, weight_sync.delta."""
NOTES = """Each row is a run of its own. Sent: bytes that reached the generator's host over those of the whole
version, by the generator's log, without the first version, which is always whole. Sync: `time/sync` of a
step: the seconds in which the trainer copied a version or the generator loaded the one before; without the
first step's, in which none loads. The runs of 1e-5 had the same metrics, bit for bit but for times and work
that was done twice, whether what changed was sent or the whole. Both hosts share the machine's two cores, one
each, which make and apply the differences too."""


def of_a_core() -> Rows:
    """How fast it finds out what changed in 64 MiB, and makes the new version of it."""
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    before = torch.randn(2**25, generator=rng).bfloat16()
    rows = [["changed values", "sent", "found out, GB/s", "applied, GB/s"]]
    for share in (0.001, 0.01, 0.03, 0.1):
        after = before.clone()
        after.view(torch.int16)[torch.rand(len(after), generator=rng) < share] ^= 1
        new, base = (tensor.view(torch.uint8).numpy() for tensor in (after, before))
        target, parts = np.empty_like(new), [*delta.parts(0, len(new))]
        began = time.perf_counter()
        encoded = [delta.encode(new[part], base[part]) for part in parts]
        between = time.perf_counter()
        for part, difference in zip(parts, encoded, strict=True):
            delta.decode(difference, base[part], target[part])
        ended = time.perf_counter()
        assert np.array_equal(target, new)
        speeds = (len(new) / 1e9 / seconds for seconds in (between - began, ended - between))
        rows.append(
            [
                f"{share:.1%}",
                f"{sum(map(len, encoded)) / len(new):.1%}",
                *(f"{speed:.2f}" for speed in speeds),
            ]
        )
        print(rows[-1], flush=True)
    return rows


def limit(host: Host, link: str) -> None:
    words = [
        "tc",
        "qdisc",
        "replace",
        "dev",
        f"{host.name}-in",
        "root",
        "tbf",
        "rate",
        link.replace(" Gbit/s", "gbit"),
    ]
    host.output(*words, "burst", "1mb", "latency", "50ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--write", action="store_true", help="write docs/weight_delta.md")
    options = parser.parse_args()
    machine()
    speeds = of_a_core()
    rows, by_rate = [["link", "learning rate", "delta", "sent", "sync, s"]], {}
    with tempfile.TemporaryDirectory(prefix="rl-delta-", dir="/var/tmp") as directory:
        for number, (link, lr, choice) in enumerate(RUNS):
            run_dir = Path(directory) / str(number)
            run_dir.mkdir()
            with two_hosts(run_dir) as made:
                limit(made[0], link)
                train(
                    made, "smollm2", "--dtype", "bfloat16", "--trainer.hosts", 0, "--generator.hosts", 1, "--steps",
                    options.steps, "--warmup.steps", 0, "--prompts_per_step", 4, "--env.num_eval", 4, "--trainer.lr", lr,
                    "--trainer.lr_warmup_steps", 0, "--trainer.lr_schedule", "constant", "--trainer.lr_min_ratio", 0, "--weight_sync.delta", choice,
                    "--run_dir", run_dir / "run", seconds=900,
                )  # fmt: skip
            came = re.findall(
                r": ([\d.]+) MB of ([\d.]+) came", (run_dir / "run/logs/generator-0.log").read_text()
            )
            sent = [float(part) / float(whole) for part, whole in came[1:]]
            seconds = [line["time/sync"] for line in read_metrics(run_dir / "run") if "loss" in line][1:]
            same = by_rate.setdefault(lr, numbers(run_dir / "run"))
            if numbers(run_dir / "run") != same:
                raise SystemExit(
                    f"{link}, {lr}, {choice}: other metrics than of the run before with this learning rate"
                )
            rows.append([link, lr, choice, f"{statistics.median(sent):.1%}", spread(seconds)])
            print(rows[-1], flush=True)
    if options.write:
        command = f"python -m benchmarks.weight_delta --steps {options.steps} --write"
        more = (
            "## A core alone",
            "Random values of bfloat16, of which a share is one off in the last place; in parts of 4 MiB.",
        )
        write_page(
            "weight_delta",
            "Weights as what changed",
            command,
            rows,
            NOTES,
            *more,
            speeds,
            packages=("zstandard",),
        )


if __name__ == "__main__":
    main()
