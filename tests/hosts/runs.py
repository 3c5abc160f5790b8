"""Runs over hosts of tests/hosts/namespaces.py, as a user starts them, and what is asked of them."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.chaos.chaos import MAY_DIFFER
from tests.hosts.namespaces import Host, hosts, worker

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
            workers.enter_context(worker(host, directory / f"worker-{host.number}.log"))
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
    """What a run has left there: files in shared memory and for temporary files, and processes but its worker."""
    files = host.output("find", "/dev/shm", "-path", "*rl-0*").split()
    commands = [" ".join(process.cmdline()) for process in host.processes()]
    return files + [words for words in commands if words and " rl worker " not in words]
