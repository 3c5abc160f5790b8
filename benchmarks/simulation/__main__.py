"""Predicts runs before they are run, and says how far one controller goes.

`python -m benchmarks.simulation [--hosts N ...] [--gpu_hosts N ...] [--write]` measures this machine and a quickstart on
it, predicts quickstart and SmolLM2 on one and on two hosts, runs them, and simulates hosts up to 1,024. As root, with
`make tasks` and `rl fetch smollm2`, on an idle machine: an hour. Each table is kept in the file --measured as soon as it is done, and a
later call takes it from there. Without numbers behind --hosts it ends with what is measured. --write: into docs/simulation.md.
"""

import argparse
import logging
import pickle
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import Rows, code_hash, machine, write_page
from benchmarks.runs import run
from benchmarks.simulation import workloads
from benchmarks.simulation.probe import link_rate, probe
from benchmarks.simulation.seconds import Machine
from benchmarks.simulation.workloads import Case
from benchmarks.simulation.world import Options, Outcome, Workload, simulate
from rl.models.tokenizer import HFTokenizer

_GBIT = 1.25e8
_FEW = 6  # steps of a large simulation
_MORE = 20  # of one in which hosts are lost
_FAILURES = 3  # expected in a run
_FAILING = (8, 32)  # hosts, where some are lost
_PARTS = ("step", "generate", "train", "sync_blocking")
NOTES = """Predicted before the run, from the parts above alone: of the quickstart's 96 and 16 prompts a step were measured, on one host; what is run has its own 64.
No run of SmolLM2 was; matrices of its sizes were multiplied. Two hosts are namespaces of this machine, a core each; they have the trainer on one and
generator and rewards on the other. Medians of the steps but the first. Answers are taken to be as long as the demonstrations that the policy has
learned from, but for the share that the quickstart's warmed-up policy does not end in time. `resampling_rounds` is 0: how many groups have no signal follows
from what is learned. All groups are taken to have one; of the quickstart's some had none, and were not trained on."""
SCALE = """Each generator has 16 prompts x 8 samples a step; the trainer has one host in four, a copy of the model on each; one step off-policy. Controller: the
share of the time for which one core of this machine would be busy with its work, its threads and Monarch's messages included. Lag: of its event loop,
by which everything that it waits for is late. Last host: seconds from a version's publishing until the last host has it. Fullest link: what some host sends
or receives, of what its link carries. Seconds and shares are of the steps but the first and the last."""
REMEDIES = """Trees: a host that has a version sends it to two others. Relays: processes beside the controller, each with so many
processes' heartbeats and answers, which reach it in one message; what they compute themselves is not counted. Neither is built; the
rows say what they would give. Sending what changed alone is built; how long it takes to find that out is not counted."""
FAILURES = """Hosts but the controller's are lost at random and are back after 60 s; a process takes 20 s to start and a death 2 s to be
noticed. Lost: seconds beyond the same run without failures, for each. A checkpoint every two steps, which takes no time here. At one
failure of a host in 1,000 hours, a run on so many hosts loses the last columns of its two rows together."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--gpu_hosts", type=int, nargs="*", default=[4, 16, 64, 256])
    parser.add_argument("--remedies", type=int, default=1024, help="hosts with which they are tried")
    parser.add_argument(
        "--measured",
        type=Path,
        default=Path("/tmp/rl-simulation-measured"),
        help="kept there, and taken from there",
    )
    parser.add_argument("--write", action="store_true", help="write docs/simulation.md")
    options = parser.parse_args()
    machine()
    logging.disable(logging.WARNING)  # deaths that are meant
    kept = Kept(options.measured)
    here: Machine = kept.value("here", lambda: probe(link_rate()))
    parts = parts_table(here)
    shown(parts)
    predictions = {case.name: predicted(case, here) for case in workloads.cases()}
    print(predictions, flush=True)
    runs = {case.name: kept.value(case.name, lambda case=case: measured(case)) for case in workloads.cases()}
    compared = comparison(predictions, runs)
    shown(compared)
    if not options.hosts:
        return
    linked, work = replace(here, link=10 * _GBIT), smollm2_work(here)
    of_cpus = scale(kept, workloads.cpu_hosts, linked, options.hosts, work)
    remedies = remedy_table(kept, linked, options.remedies, work)
    failures = failure_table(kept, linked, _FAILING, work)
    gpus = workloads.with_gpus(here, 400 * _GBIT)
    answers = Workload([512, 1024, 1536, 2048], 200)
    of_gpus = scale(kept, workloads.gpu_hosts, gpus, options.gpu_hosts, answers)
    if options.write:
        hosts, gpu_hosts = (" ".join(map(str, each)) for each in (options.hosts, options.gpu_hosts))
        command = f"python -m benchmarks.simulation --hosts {hosts} --gpu_hosts {gpu_hosts} --remedies {options.remedies} --write"
        assumed = """The same, with eight H100 a host, links of 400 Gbit/s and the sizes of Qwen3-8B. Answers have 512 to 2,048 tokens and are decoded
after 200 of a prompt, whose own computing is not counted. The GPUs' rates are assumed, not measured."""
        write_page(
            "simulation", "Runs that are simulated", command, parts, "## Against real runs", NOTES, compared,
            "## SmolLM2 on hosts like this one, links of 10 Gbit/s", SCALE, of_cpus, REMEDIES, remedies, FAILURES, failures,
            "## GPUs", assumed, of_gpus,
        )  # fmt: skip


class Kept:
    """What was measured and simulated, in a file, so that a run that ends early loses one table at most."""

    def __init__(self, path: Path):
        self._path, code = path, code_hash("simulation")
        self._values = pickle.loads(path.read_bytes()) if path.exists() else {"code": code}
        if self._values["code"] != code:
            raise SystemExit(
                f"{path} was measured by other code; remove it, or name another file by --measured"
            )

    def value(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._values:
            self._values[name] = make()
            self._path.write_bytes(pickle.dumps(self._values))
        return self._values[name]


def shown(rows: Rows) -> None:
    print("\n".join(" | ".join(cells) for cells in rows), flush=True)


def parts_table(here: Machine) -> Rows:
    rows = [["part", "measured"]]
    for threads, device in sorted(here.devices.items()):
        cores = f"{threads} core{'s' * (threads > 1)}"
        rows += [
            [f"{cores}, {dtype}, {num_rows} rows, GFLOP/s", f"{rate / 1e9:.0f}"]
            for dtype, rates in device.flops.items()
            for num_rows, rate in rates.items()
        ]
        rows.append([f"{cores}, memory, GB/s", f"{device.memory / 1e9:.1f}"])
        rows.append([f"{cores}, smallest operation, us", f"{device.op * 1e6:.1f}"])
        rows.append([f"{cores}, a random number, ns", f"{device.random * 1e9:.1f}"])
    rows += [
        [f"quickstart, {name}, ms", f"{value * 1e3:.2f}"] for name, value in vars(here.overheads).items()
    ]
    rows.append(["quickstart, answers that are cut at their limit", f"{here.cut:.2%}"])
    rows.append(["between two hosts, GB/s", f"{here.link / 1e9:.2f}"])
    controls = here.controls
    rows.append(["a call, us of the controller's core", f"{controls.call * 1e6:.0f}"])
    rows.append(["a MB of it, us of the controller's core", f"{controls.byte * 1e12:.0f}"])
    return [*rows, ["until its answer, us", f"{controls.latency * 1e6:.0f}"]]


def tokenizer_of(case: Case) -> HFTokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return HFTokenizer(case.config.model.materialize(Path(directory)))


def smollm2_work(here: Machine) -> Workload:
    case = workloads.cases()[-1]
    return workloads.workload(case.config, tokenizer_of(case), here.cut)


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step.get(f"time/{name}", 0.0) for step in steps[1:]) for name in _PARTS}


def predicted(case: Case, here: Machine) -> dict[str, float]:
    work = workloads.workload(case.config, tokenizer_of(case), here.cut)
    return medians(simulate(case.config, case.cluster, here, work).steps)


def measured(case: Case) -> dict[str, float]:
    if case.num_hosts == 1:
        return medians(run(case.recipe, *workloads.FLAGS)["steps"])
    from tests.hosts.runs import train, two_hosts
    from tests.integration.runs import read_metrics

    with tempfile.TemporaryDirectory(prefix="rl-simulation-", dir="/var/tmp") as directory:
        with two_hosts(Path(directory)) as made:
            train(made, case.recipe, *workloads.FLAGS, "--run_dir", f"{directory}/run", seconds=1200)
        return medians([line for line in read_metrics(Path(directory) / "run") if "loss" in line])


def comparison(predictions: dict[str, dict[str, float]], runs: dict[str, dict[str, float]]) -> Rows:
    rows = [["run", *(f"{name}, s: predicted, measured (ratio)" for name in _PARTS)]]
    for name, prediction in predictions.items():
        pairs = [(prediction[part], runs[name][part]) for part in _PARTS]
        rows.append([name, *(f"{a:.2f}, {b:.2f} ({a / b:.2f})" if b else f"{a:.2f}, 0" for a, b in pairs)])
    return rows


def scale(kept: Kept, of: Callable, here: Machine, counts: Sequence[int], work: Workload) -> Rows:
    header = [
        "hosts",
        "generators",
        "samples a step",
        "s/step",
        "samples/s",
        "generators",
        "trainer",
        "controller",
    ]
    rows = [[*header, "lag, ms: median, p99", "last host, s", "fullest link", "the limit"]]
    for count in counts:
        config, cluster = of(count, _FEW)

        def cells(config=config, cluster=cluster) -> list[str]:
            return row(config, simulate(config, cluster, here, work), here)

        rows.append([str(count), *kept.value(f"{of.__name__} {count}", cells)])
        print(rows[-1], flush=True)
    return rows


def row(config, outcome: Outcome, here: Machine) -> list[str]:
    samples = config.prompts_per_step * config.group_size
    steady = outcome.steady(config.generator.num_replicas, here.link)
    used = {name: getattr(steady, name) for name in ("generators", "trainer", "controller", "links")}
    lag = np.percentile(np.array(outcome.lags) * 1e3, [50, 99])
    return [
        str(config.generator.num_replicas), f"{samples:,}", f"{steady.step:.1f}", f"{samples / steady.step:,.0f}",
        *(f"{used[name]:.0%}" for name in ("generators", "trainer", "controller")),
        f"{lag[0]:.0f}, {lag[1]:.0f}", f"{max(outcome.fetches, default=0.0):.2f}", f"{used['links']:.0%}",
        max(used, key=lambda name: used[name]),
    ]  # fmt: skip


def remedy_table(kept: Kept, here: Machine, count: int, work: Workload) -> Rows:
    rows = [
        [
            "hosts",
            "remedy",
            "s/step",
            "samples/s",
            "controller",
            "lag, ms: median, p99",
            "last host, s",
            "fullest link",
        ]
    ]
    variants = {
        "none": Options(),
        "trees": Options(tree=True),
        "relays of 16": Options(relay=16),
        "both": Options(tree=True, relay=16),
        "both, and what changed alone (3%)": Options(tree=True, relay=16, delta=0.03),
    }
    config, cluster = workloads.cpu_hosts(count, _FEW)
    for name, options in variants.items():
        cells = kept.value(
            f"{name}, {count}",
            lambda options=options: row(config, simulate(config, cluster, here, work, options), here),
        )
        rows.append([str(count), name, cells[2], cells[3], cells[6], cells[7], cells[8], cells[9]])
        print(rows[-1], flush=True)
    return rows


def failure_table(kept: Kept, here: Machine, counts: Sequence[int], work: Workload) -> Rows:
    rows = [
        [
            "hosts",
            "lost",
            "times",
            "restarts of the trainer",
            "s for each",
            "of the time, at one in 1,000 h of a host",
        ]
    ]
    for count in counts:
        config, cluster = workloads.cpu_hosts(count, _MORE)
        sections = {name: getattr(config, name) for name in ("trainer", "generator", "reward")}
        lasting = {name: replace(section, max_restarts=1000) for name, section in sections.items()}
        config = replace(config, **lasting, save_every=2)
        simulated = partial(simulate, config, cluster, here, work)
        whole = kept.value(f"whole {count}", simulated)
        trainers = len(config.trainer.hosts)
        for name, hosts in (("generators", range(trainers, count)), ("trainer", range(1, trainers))):
            rate = _FAILURES / (whole.seconds / 3600) / len(hosts)
            often = Options(failures_per_hour=rate, failing=tuple(hosts))
            outcome = kept.value(f"{name} lost, {count}", partial(simulated, often))
            lost = (outcome.seconds - whole.seconds) / max(1, outcome.num_failures)
            cells = [
                str(outcome.num_failures),
                str(outcome.restarts),
                f"{lost:.0f}",
                f"{lost * len(hosts) / 3.6e6:.3%}",
            ]
            rows.append([str(count), f"a host of {name}", *cells])
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
