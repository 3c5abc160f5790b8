"""Cores and memory by cgroups of both versions, on trees of files as kernels have them."""

import subprocess
import sys
from math import inf

import pytest

from rl.cgroups import core_quota, memory_left, memory_limit, num_killed
from rl.cluster import machine

GIB = 2**30
V1_NONE = "9223372036854771712"


def tree(root, files, cgroup, vmstat="nr_free_pages 5\noom_kill 3\n"):
    """files: path under /sys/fs/cgroup -> content. cgroup: of /proc/self/cgroup."""
    for path, content in files.items():
        (root / "sys/fs/cgroup" / path).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / path).write_text(f"{content}\n")
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/vmstat").write_text(vmstat)
    return root


def v2(path, cpu="max 100000", most="max", used=0, files=0, killed=0):
    at = f"{path}/" if path else ""
    return {
        f"{at}cpu.max": cpu, f"{at}memory.max": most, f"{at}memory.current": used,
        f"{at}memory.stat": f"anon 1\ninactive_file {files}\nactive_file 9", f"{at}memory.events": f"low 0\noom 9\noom_kill {killed}",
    }  # fmt: skip


def v1(path, quota=-1, most=V1_NONE, used=0, files=0, killed=0):
    return {
        f"cpu,cpuacct/{path}cpu.cfs_quota_us": quota, f"cpu,cpuacct/{path}cpu.cfs_period_us": 100000,
        f"memory/{path}memory.limit_in_bytes": most, f"memory/{path}memory.usage_in_bytes": used,
        f"memory/{path}memory.stat": f"inactive_file 7\ntotal_inactive_file {files}",
        f"memory/{path}memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {killed}",
    }  # fmt: skip


V1 = "9:name=systemd:/\n5:memory:{0}\n4:cpu,cpuacct:{0}\n0::/\n"
UNLIMITED = {"a/": {}, "": {}}
CASES = {
    "no cgroups": ({}, "", (inf, inf, inf, 3)),
    "v2, unlimited": (v2("job"), "0::/job\n", (inf, inf, inf, 0)),
    "v2": (v2("job", "150000 100000", 6 * GIB, GIB, 0, 4), "0::/job\n", (1.5, 6 * GIB, 5 * GIB, 4)),
    "v2, files make room": (v2("job", most=6 * GIB, used=6 * GIB, files=2 * GIB), "0::/job\n", (inf, 6 * GIB, 2 * GIB, 0)),
    "v2, the middle is tightest": (
        v2("a", "800000 100000", 64 * GIB, 3 * GIB) | v2("a/b", "200000 100000", 8 * GIB, 3 * GIB) | v2("a/b/c"),
        "0::/a/b/c\n", (2, 8 * GIB, 5 * GIB, 0),
    ),
    "v2, the outermost is fullest": (
        v2("a", most=64 * GIB, used=63 * GIB) | v2("a/b", most=8 * GIB), "0::/a/b\n", (inf, 8 * GIB, GIB, 0)
    ),
    "v2, over its limit": (v2("job", most=GIB, used=2 * GIB), "0::/job\n", (inf, GIB, 0, 0)),
    "v2, a container's own is the mount": (v2("", "50000 100000", GIB), "0::/docker/12ab\n", (0.5, GIB, GIB, 0)),
    "v2, outside the namespace": (v2("", "50000 100000", GIB), "0::/../../pod\n", (0.5, GIB, GIB, 0)),
    "v1, unlimited": (v1("") | v1("job/"), V1.format("/job"), (inf, inf, inf, 0)),
    "v1": (v1("") | v1("job/", 100000, 6 * GIB, 3 * GIB, GIB, 5), V1.format("/job"), (1, 6 * GIB, 4 * GIB, 5)),
    "v1, nested": (
        v1("") | v1("a/", 300000, 8 * GIB, 7 * GIB) | v1("a/b/", -1, 6 * GIB, GIB), V1.format("/a/b"), (3, 6 * GIB, GIB, 0)
    ),
    "v1, a container's own is the mount": (v1("", 250000, GIB), V1.format("/docker/12ab"), (2.5, GIB, GIB, 0)),
    "both, by controllers": (
        v1("job/", most=GIB) | {"unified/cgroup.procs": 1}, "5:memory:/job\n0::/\n", (inf, GIB, GIB, 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_tightest_level_holds(case, tmp_path):
    files, cgroup, expected = CASES[case]
    root = tree(tmp_path, files, cgroup)
    assert (core_quota(root), memory_limit(root), memory_left(root), num_killed(root)) == expected


@pytest.mark.parametrize(
    ("quota", "affinity", "cores"), [(inf, 8, 8), (2.5, 8, 3), (0.2, 8, 1), (4, 1, 1), (4, 4, 4)]
)
def test_cores_are_the_fewer_of_affinity_and_quota_rounded_up(quota, affinity, cores, monkeypatch):
    monkeypatch.setattr(machine, "core_quota", lambda: quota)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(affinity)))
    assert machine.num_cores() == cores


def test_memory_is_the_less_of_the_hosts_and_the_cgroups(monkeypatch):
    free = machine.psutil.virtual_memory().available
    monkeypatch.setattr(machine, "memory_left", lambda: inf)
    assert 0.5 * free < machine.free_memory() < 2 * free  # holds: meaning, the same number a moment later
    monkeypatch.setattr(machine, "memory_left", lambda: 5.0)
    assert machine.free_memory() == 5


def test_affinity_counts_in_a_real_process():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from rl.cluster.machine import num_cores; print(num_cores())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "1\n", ended.stderr
