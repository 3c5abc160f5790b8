"""Whether memory ran out is told by the kernel's counters, and by nothing else."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.actors import out_of_memory
from rl.actors.out_of_memory import MemoryWatch, residents
from rl.actors.remote import Caller, Deadline, ProcessDied
from rl.processes import ProcessInfo
from tests.cgroups import memory_cgroup

GIB = 2**30
NOT_SPAWNED = "error spawning actor mesh: statuses: Timeout(30.05s)=1..2;Running=0..1"


@pytest.fixture
def host(monkeypatch):
    """killed: the kernel's counter; sizes: of processes, by log."""
    state = {"killed": 7, "sizes": {"controller": GIB // 2, "reward-0": GIB // 4, "generator-0": 2 * GIB}}
    monkeypatch.setattr(out_of_memory, "num_killed", lambda: state["killed"])
    monkeypatch.setattr(out_of_memory, "residents", lambda: dict(state["sizes"]))
    monkeypatch.setattr(out_of_memory, "memory_limit", lambda: 6.0 * GIB)
    return state


def test_a_death_without_a_kill_says_nothing_of_memory(host):
    assert Caller("trainer", "logs/x").death("trainer", "optim_step", "pid 3 on h") == (
        "the process of trainer died in optim_step (pid 3 on h); see logs/x"
    )


def test_a_kill_is_named_with_sizes_and_settings(host, monkeypatch):
    monkeypatch.setattr(out_of_memory, "_resident", lambda pid: 6 * GIB)
    caller = Caller("trainer", "logs/x")
    caller._memory.look([3])
    host["killed"] += 1
    assert caller.death("trainer", "optim_step", "pid 3 on h") == (
        "the process of trainer died in optim_step (pid 3 on h); memory ran out: since trainer last answered, "
        "the kernel killed a process for it; of 6.0 GiB the run took, in GiB: trainer 6.0, generator-0 2.0, "
        "controller 0.5, reward-0 0.2; lower max_seq_len and trainer.micro_batch_tokens "
        "(rl serve: context_length), or set --trainer.activation_checkpointing full and "
        "generator.kv_cache_gib or generator.num_replicas (rl serve: kv_cache_gib, num_generators), or end other programs; see logs/x"
    )
    assert "memory" not in caller.death("trainer", "optim_step", "pid 3 on h")  # each kill is told once


def test_of_other_hosts_processes_nothing_is_said(host):
    caller = Caller("trainer", "logs/x")
    caller.processes = (ProcessInfo(3, "10.0.0.2:7000", "cpu", lease="a lease"),)
    host["killed"] += 1
    assert "memory" not in caller.death("trainer", "optim_step", "pid 3 on 10.0.0.2:7000")


@pytest.mark.parametrize(
    "name", ["trainer", "critic", "reference", "generator-0", "judge-1", "reward-2", "torchstore"]
)
def test_every_way_to_die_says_so_for_every_role(name, host):
    async def fails():
        host["killed"] += 1
        raise RuntimeError(NOT_SPAWNED)

    with pytest.raises(ProcessDied, match=f"memory ran out.*{name} last answered"):
        asyncio.run(Caller(name).call(fails(), "start", Deadline("start", 5.0)))


def test_ranks_of_one_mesh_count_once(host):
    host["sizes"] |= {"trainer-0": 2 * GIB, "trainer-1": GIB}
    watch = MemoryWatch("trainer")
    host["killed"] += 2
    assert (
        "killed 2 processes" in (why := watch.why_died()) and "trainer 3.0" in why and "trainer-0" not in why
    )


def test_sizes_are_by_log(tmp_path):
    with (tmp_path / "reward-0.log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", "x = b'0' * 2**26; print(flush=True); input()"],
            stdout=log,
            stdin=subprocess.PIPE,
        )
    while not (tmp_path / "reward-0.log").stat().st_size:
        pass
    sizes = residents()
    child.communicate(b"\n")
    assert sizes["reward-0"] > 2**26 and sizes["controller"] > 2**24  # holds: exact


HOG = """
import os, subprocess, sys
from rl.actors.out_of_memory import MemoryWatch
watch = MemoryWatch("trainer")
hog = subprocess.Popen([sys.executable, "-c", "x = bytearray(2**28)"])
print(hog.wait(), watch.why_died(), sep="\\n")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes cgroups")
def test_a_process_that_the_kernel_really_killed():
    with memory_cgroup(128 * 2**20) as enter:
        ended = subprocess.run(
            [sys.executable, "-c", HOG], preexec_fn=enter, capture_output=True, text=True, timeout=60
        )
    code, why = ended.stdout.splitlines()
    assert code == "-9" and "the kernel killed a process" in why and "of 0.1 GiB" in why


def test_the_kernel_killed_nobody_here():
    assert MemoryWatch("trainer").why_died() == "" and Path("/proc/vmstat").exists()
