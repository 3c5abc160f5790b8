"""Hosts that join, that are lost for good, and that do not see the run's directory."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.hosts.namespaces import hosts, worker
from tests.hosts.runs import (
    MORTAL,
    RL,
    TWO_RANKS,
    check_same,
    left_on,
    numbers,
    start,
    steps_of,
    train,
    two_hosts,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")]


ONE_THREAD = ("--trainer.num_threads", 1, "--generator.num_threads", 1, "--generator.num_replicas", 2)


def alone(run_dir, *flags):
    """The numbers of a run on this host, with a trainer of one rank."""
    words = [*RL, "train", MORTAL, *map(str, (*ONE_THREAD, *flags, "--run_dir", run_dir))]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    return numbers(run_dir)


def test_a_run_whose_directory_is_on_one_host_alone(directory):
    """Generators and rewards on a host that does not see it: models go there, logs come back, nothing is left."""
    expected = alone(directory / "one")
    with two_hosts(directory, unshared=[Path("/srv")]) as made:
        output = train(made, MORTAL, *ONE_THREAD, "--reward.num_procs", 2, "--run_dir", "/srv/run")
        assert f"host {made[1].worker_address} does not see /srv/run; its logs come here" in output
        made[0].output("cp", "-r", "/srv/run", str(directory / "run"))
        assert [left_on(host) for host in made] == [[], []]
        assert made[1].output("ls", "-A", "/srv") == ""
    check_same(numbers(directory / "run"), expected)
    for name in ("generator-0", "generator-1", "reward-0", "reward-1"):
        assert (directory / "run" / "logs" / f"{name}.log").exists()
    assert "vllm" in (directory / "run" / "logs" / "generator-1.log").read_text().lower()


def test_a_host_joins_a_run_and_leaves_it(directory):
    """Its generator serves while it is there. What is sampled where changes nothing."""
    flags, run_dir = (*ONE_THREAD, "--steps", 120), directory / "run"
    expected = alone(directory / "one", "--steps", 120)
    with hosts(2) as made, worker(made[0], directory / "worker-0.log"):
        joining = ("--joining_hosts", 1, "--generator.hosts", 0, 1)
        process = start(made[:1], MORTAL, *flags, *joining, "--run_dir", run_dir)
        wait_for(lambda: steps_of(run_dir) >= 5, run_dir, process)
        with worker(made[1], directory / "worker-1.log", join=made[0]):
            wait_for(lambda: serving(run_dir)[-1] == 2, run_dir, process)
            joined_at = steps_of(run_dir)
            wait_for(lambda: steps_of(run_dir) >= joined_at + 5, run_dir, process)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output[-4000:]
        assert [left_on(host) for host in made] == [[], []]
    assert f"host {made[1].worker_address} has joined the run; generator-1 starts there" in output
    assert f"host {made[1].worker_address} has left the run" in output
    counts = serving(run_dir)
    assert counts[:5] == [1] * 5 and counts.count(2) >= 4 and counts[-1] == 1
    check_same(numbers(run_dir), expected)


def serving(run_dir):
    """Generators at each step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["generators/serving"] for line in lines if "generators/serving" in line]


def test_a_trainer_host_that_is_lost_for_good_leaves_fewer_shards_and_the_same_generators(
    directory, on_one_host
):
    """Its shards go to the host that is left, from the newest checkpoint; generators do not notice."""
    run_dir = directory / "run"
    flags = (*TWO_RANKS, "--trainer.hosts", 0, 1, "--generator.hosts", 0, "--reward.hosts", 0)
    with two_hosts(directory) as made:
        more = ("--trainer.min_hosts", 1, "--deadlines.start", 100, "--run_dir", run_dir)
        process = start(made, MORTAL, *flags, *more)
        wait_for(lambda: steps_of(run_dir) >= 5, run_dir, process)
        before = generators_on(made[0])
        made[1].cut()
        wait_for(lambda: steps_of(run_dir) >= 8, run_dir, process)
        assert before and generators_on(made[0]) == before
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output[-4000:]
        assert left_on(made[0]) == []
    assert (
        f"host 1 ({made[1].worker_address}), where engines are, does not answer; they go on without it"
        in output
    )
    check_same(*([_without_rows(line) for line in run] for run in (numbers(run_dir), on_one_host)))


def _without_rows(line):
    """But for how sequences were laid into the rows of the ranks, which are fewer."""
    return {name: value for name, value in line.items() if name not in ("tokens/computed", "tokens/cuts")}


def generators_on(host):
    """Their pids, as the machine counts."""
    return {p.pid for p in host.processes() if "generator" in log_of(p.pid)}


def log_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
