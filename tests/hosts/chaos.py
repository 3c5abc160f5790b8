"""Faults of two hosts, at random moments of real runs, held against a run that nothing happened to.

`python -m tests.hosts.chaos [--faults N] [--seed S]` prints a table.
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from tests.chaos.chaos import Kill, Outcome, Setting, Victim, differences
from tests.hosts.namespaces import Host, hosts, wait_for_worker

SECONDS = 420.0  # in which a run has to end, whatever is done to it
PROCESSES = ("trainer-0", "trainer-1", "generator-0", "generator-1", "reward-0", "reward-1")
TWO_HOSTS = (
    "--trainer.layout.shard", "2", "--trainer.hosts", "0", "1", "--trainer.num_threads", "1",
    "--generator.num_replicas", "2", "--generator.hosts", "0", "1", "--generator.num_threads", "1",
    "--reward.num_procs", "2", "--reward.hosts", "0", "1",
)  # fmt: skip
SETTING = Setting("two hosts", "mortal", TWO_HOSTS, ())
KINDS = ("process", "Monarch's worker", "rl worker", "link for 20 s", "link for 90 s", "controller")
_LOOP = 'while :; do "$@"; sleep 0.5; done'
_LIMITS = ("--deadlines.progress", "5", "--deadlines.start", "120")


class OnHosts(Victim):
    """A run whose controller is on the first host; each host has an `rl worker` that is started again."""

    def __init__(self, setting: Setting, directory: Path, made: list[Host]):
        self.hosts = made
        self._workers: dict[str, subprocess.Popen] = {}
        for host in made:
            if not host.has_worker:
                start_worker(host, directory)
        for host in made:
            wait_for_worker(host)
        super().__init__(setting, directory)

    def start(self) -> None:
        flags = (*self.setting.flags, *_LIMITS, "--resume", "latest")
        self.process = self.hosts[0].start(
            sys.executable, "-m", "rl", "train", f"tests/recipes.py:{self.setting.recipe}", "--hosts",
            ",".join(host.worker_address for host in self.hosts), "--run_dir", str(self.run_dir), *flags,
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def look(self) -> None:
        """What is left on a host is looked for at the end."""

    def inside(self, name: str, host: Host | None = None) -> list[psutil.Process]:
        """By a part of the command, or by its log."""
        log, there = str((self.run_dir / "logs" / f"{name}.log").resolve()), []
        for process in [p for h in ([host] if host else self.hosts) for p in h.processes()]:
            with contextlib.suppress(psutil.Error, OSError):
                writes = os.path.realpath(f"/proc/{process.pid}/fd/1") == log
                if writes or name in " ".join(process.cmdline()):
                    there.append(process)
        return there

    def suffer(self, kind: str, rng: random.Random) -> str:
        """One fault, and its words; empty where it could not be made."""
        host = rng.choice(self.hosts)
        if kind == "controller":
            (process, *_) = self.inside(" rl train ", self.hosts[0]) or [None]
            if process is None:
                return ""
            process.kill()
            self.process.wait()
            self.start()
            return kind
        if kind.startswith("link"):
            seconds = float(kind.split()[2])
            self.hosts[1].cut()
            time.sleep(seconds)
            self.hosts[1].heal()
            return kind
        name = {"Monarch's worker": "rl.cluster.monarch_worker", "rl worker": " rl worker "}.get(kind)
        victim = name or rng.choice(PROCESSES)
        found = self.inside(victim, host if name else None)
        leaders = [process for process in found if "sh" not in process.name()]
        if not leaders:
            return ""
        leaders[0].kill()
        return f"{victim if kind == 'process' else kind} of host {host.number}" if name else victim

    def left(self) -> list[str]:
        """After the run, but for the workers themselves."""
        left = []
        for host in self.hosts:
            for process in host.processes():
                with contextlib.suppress(psutil.Error):
                    words = " ".join(process.cmdline())
                    if not any(part in words for part in (" rl worker ", "while :;", "sleep", "janitor")):
                        left.append(f"host {host.number}: {words[:80] or process.name()}")
            left += [
                f"host {host.number}: {path}"
                for path in host.output("find", "/dev/shm", "-type", "f").split()
            ]
        return left

    def outcome(self) -> Outcome:
        found = super().outcome()
        deadline = time.monotonic() + 60
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(1)
        found.left_behind += left
        return found


def start_worker(host: Host, directory: Path) -> None:
    with (directory / f"worker-{host.number}.log").open("ab") as file:
        host.start(
            "sh", "-c", _LOOP, "sh", sys.executable, "-m", "rl", "worker", "--listen", host.worker_address,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    host.has_worker = True


def disturbed(
    directory: Path, made: list[Host], rng: random.Random, kinds: list[str], about: float
) -> Outcome:
    victim, faults = OnHosts(SETTING, directory, made), []
    began = time.monotonic()
    next_at = began + rng.uniform(0.2, 0.8) * about
    waiting: tuple[Kill, float, int] | None = None
    while not victim.is_over and time.monotonic() - began < SECONDS:
        time.sleep(0.1)
        now, done = time.monotonic(), victim.num_steps
        if waiting is not None and done > waiting[2]:
            waiting[0].seconds, waiting = now - waiting[1], None
            next_at = now + rng.uniform(0.05, 0.4) * about
        if waiting is None and kinds and now > next_at and (what := victim.suffer(kinds[0], rng)):
            fault = Kill(kinds.pop(0), 0)
            faults.append(fault)
            print(f"  {now - began:.0f} s, step {done}: {what}", flush=True)
            waiting = (fault, now, victim.num_steps)
    if not victim.is_over:
        victim.process.kill()
        victim.process.wait()
    found = victim.outcome()
    found.kills = faults
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="one kind of fault")
    options = parser.parse_args()
    rng, table, number = random.Random(options.seed), defaultdict(list), 0
    kinds = [options.only] if options.only else list(KINDS)
    with hosts(2) as made, tempfile.TemporaryDirectory(prefix="rl-hosts-", dir="/var/tmp") as directory:
        whole_dir = Path(directory) / "whole"
        whole_dir.mkdir()
        began = time.monotonic()
        whole = OnHosts(SETTING, whole_dir, made)
        whole.process.wait(SECONDS)
        expected, about = whole.outcome(), time.monotonic() - began
        print(
            f"undisturbed: {about:.0f} s, survived {expected.survived}, left {expected.left_behind}",
            flush=True,
        )
        if not expected.survived:
            raise SystemExit(expected.output[-4000:])
        while number < options.faults:
            some = [kinds[(number + i) % len(kinds)] for i in range(min(2, options.faults - number))]
            target = Path(directory) / str(number)
            target.mkdir()
            found = disturbed(target, made, rng, some, about)
            wrong = differences(SETTING, found, expected)
            number += max(1, len(found.kills))
            print(f"{', '.join(f'{k.kind} ({k.seconds:.0f} s)' for k in found.kills)}: "
                  f"{'; '.join(wrong) or 'the same run'}", flush=True)  # fmt: skip
            for kill in found.kills:
                table[kill.kind].append((kill.seconds, not wrong))
    for kind, rows in table.items():
        seconds = [s for s, _ in rows if s]
        times = f"{statistics.median(seconds):.0f}, {max(seconds):.0f}" if seconds else "it was over"
        print(f"{kind} | {len(rows)} | {sum(good for _, good in rows)} | {times}")
    raise SystemExit(any(not good for rows in table.values() for _, good in rows))


if __name__ == "__main__":
    main()
