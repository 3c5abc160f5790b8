"""Runs over hosts of tests/hosts/namespaces.py, as a user starts them, and what is asked of them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos.chaos import MAY_DIFFER
from tests.hosts.namespaces import Host, hosts, wait_for_worker, worker

RL = (sys.executable, "-m", "rl")
MORTAL = "tests/recipes.py:mortal"
TWO_RANKS = (
    "--trainer.layout.shard", "2", "--trainer.num_threads", "1", "--generator.num_replicas", "2",
    "--generator.num_threads", "1", "--reward.num_procs", "2",
)  # fmt: skip
OVER_BOTH = (*TWO_RANKS, "--trainer.hosts", "0", "1", "--generator.hosts", "0", "1", "--reward.hosts", "1")


@contextmanager
def two_hosts(directory: Path, count: int = 2, unshared: Sequence[Path] = ()) -> Iterator[list[Host]]:
    """Each with an `rl worker`."""
    with hosts(count, unshared) as made, ExitStack() as workers:
        for host in made:
            workers.enter_context(worker(host, directory / f"worker-{host.number}.log", waits=False))
        for host in made:
            wait_for_worker(host)
        yield made


def addresses(made: Sequence[Host]) -> str:
    return ",".join(host.worker_address for host in made)


def start(made: Sequence[Host], *arguments: object) -> subprocess.Popen:
    """A run whose controller is on the first host. Its output is to be read."""
    words = [*RL, "train", *map(str, arguments), "--hosts", addresses(made)]
    return made[0].start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(made: Sequence[Host], *arguments: object, seconds: float = 240) -> str:
    """Its controller is on the first host. What it printed."""
    process = start(made, *arguments)
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    return output


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """Of metrics.jsonl, but for times and what is computed twice."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{n: v for n, v in line.items() if not n.startswith(MAY_DIFFER)} for line in lines]


def left_on(host: Host) -> list[str]:
    """What a run has left there: files in shared memory and for temporary files, and processes but its worker.

    A zombie has no command, and is what has ended.
    """
    files = host.output("find", "/dev/shm", "-path", "*rl-0*").split()
    commands = []
    for process in host.processes():
        with suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
    return files + [words for words in commands if words and " rl worker " not in words]


def check_same(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """To 1e-5, with the same accuracy."""
    assert [line.keys() for line in got] == [line.keys() for line in expected]
    for mine, other in zip(got, expected, strict=True):
        # holds: meaning, the same computation elsewhere: rounding alone differs, if anything
        assert mine == pytest.approx(other, abs=1e-5, rel=1e-5), mine["step"]
        assert mine.get("eval/accuracy") == other.get("eval/accuracy")


def steps_of(run_dir: Path) -> int:
    """The last step that has been recorded."""
    try:
        return max((line["step"] for line in numbers(run_dir) if "loss" in line), default=0)
    except (OSError, ValueError):
        return 0


def _last_words(run_dir: Path, more: Sequence[Path]) -> list[str]:
    """What a run that did not come so far says: of its steps, and of a job."""
    logs = [run_dir / "progress.log", *run_dir.glob("slurm-*.log"), *run_dir.glob("logs/host-*.log"), *more]
    return [f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in logs if path.exists()]


def wait_for(
    holds: Callable[[], bool],
    run_dir: Path,
    process: subprocess.Popen | None = None,
    seconds: float = 400,
    logs: Sequence[Path] = (),
) -> None:
    """process: the run's, which must not end before. logs: more of them, shown where it does not hold."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, _last_words(run_dir, logs)
        assert process is None or process.poll() is None, process.communicate()[0][-4000:]
        time.sleep(0.5)
