"""Real runs in surroundings that users have: right, or refused in a sentence; and nothing of anybody else's removed."""

# holds: clock

import fcntl
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rl.owned_directory import SHARED_MEMORY
from rl.processes import ProcessInfo, is_gone
from tests.cgroups import memory_cgroup
from tests.devices import with_all
from tests.integration.runs import ROOT, pid_of, read_metrics, shared_leftovers, start, wait_for_line

pytestmark = pytest.mark.slow
TRAIN = ["--warmup.steps", "1", "--env.num_eval", "8", "--prompts_per_step", "4", "--group_size", "2"]
QUICK = ["train", "quickstart", *TRAIN, "--steps", "1", "--eval_every", "1"]
LONG = [
    "train",
    "tests/recipes.py:deserting",
    *TRAIN,
    "--save_every",
    "100000",
    "--steps",
    "100000",
    "--eval_every",
    "100000",
]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root mounts and makes cgroups")


@pytest.fixture
def temporary():
    """A TMPDIR whose path has room for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def strangers():
    """What other programs and users have in shared memory, under names like a run's. They stay as they are."""
    mark = uuid.uuid4().hex[:8]
    names = (f"data-cache-{mark}", f"4194305-{mark}-run", f"{os.getuid() + 1 + int(mark, 16)}")
    folders = [SHARED_MEMORY / f"rl-{name}" for name in names]
    for folder in folders:
        folder.mkdir()
        (folder / "data").write_text("theirs")
    try:
        yield
        assert [(folder / "data").read_text() for folder in folders] == ["theirs"] * 3
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def started(arguments, output, prefix=(), env=None, **how):
    """`rl` in a process of its own, which is killed where it has not ended."""
    command = [*prefix, sys.executable, "-u", "-m", "rl.cli", *map(str, arguments)]
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=with_all() | {"PYTHONPATH": str(ROOT)} | (env or {}),
            stdout=file, stderr=subprocess.STDOUT, **how,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_for(process, output, text, seconds=200):
    deadline = time.monotonic() + seconds
    while text not in output.read_text():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


def until(state, seconds=100):
    deadline = time.monotonic() + seconds
    while not state():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def leftovers(temporary, pid):
    """But torch's cache of kernels, which is for later runs."""
    own = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    return [*own, *SHARED_MEMORY.glob(f"rl-*/{pid}-*"), *Path("/tmp").glob(f"rl-*/{pid}-*")]


def num_threads(process, run_dir, name):
    environment = psutil.Process(pid_of(process, run_dir, name)).environ()
    return int(environment["OMP_NUM_THREADS"])


def test_nohup_with_a_closed_terminal(tmp_path, temporary, strangers):
    ours, theirs = pty.openpty()

    def in_a_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    output = tmp_path / "output"
    with started(
        [*QUICK, "--run_dir", tmp_path / "run"], output, ["nohup"], {"TMPDIR": str(temporary)},
        stdin=theirs, preexec_fn=in_a_terminal,
    ) as process:  # fmt: skip
        os.close(theirs)
        wait_for(process, output, "starting processes")
        os.close(ours)  # the kernel sends SIGHUP, and a shell that ends may too
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(200) == 0, output.read_text()
    assert [step["step"] for step in read_metrics(tmp_path / "run")] == [0, 1]
    assert not leftovers(temporary, process.pid)


def test_temporary_files_in_shared_memory(tmp_path, strangers):
    """`rl eval` has its scratch there, beside the run's directory."""
    output, before = tmp_path / "output", set(SHARED_MEMORY.iterdir())
    arguments = [
        "train",
        "quickstart",
        *TRAIN,
        "--steps",
        "1",
        "--eval_every",
        "1",
        "--run_dir",
        tmp_path / "run",
    ]
    for command in (arguments, ["eval", tmp_path / "run", "quickstart", "--env.num_eval", "8"]):
        with started(command, output, env={"TMPDIR": str(SHARED_MEMORY)}) as process:
            assert process.wait(200) == 0, output.read_text()
        left = set(SHARED_MEMORY.iterdir()) - before
        ours = SHARED_MEMORY / f"rl-{os.getuid()}"  # another run's directory may be there
        assert not any(ours.glob(f"{process.pid}-*"))
        assert all(path == ours or path.name.startswith("torchinductor_") for path in left), left
    assert "accuracy" in output.read_text()


def zombies(pid):
    own = [ProcessInfo(child.pid, socket.gethostname(), "cpu") for child in psutil.Process(pid).children()]
    return {process.pid for process in own if psutil.pid_exists(process.pid) and is_gone(process)}


def test_one_core_by_affinity_orphans_and_a_kill(tmp_path, temporary):
    """Rewards that hang leave processes, which become the controller's."""
    output, run_dir = tmp_path / "output", tmp_path / "run"
    core = str(min(os.sched_getaffinity(0)))
    environment = {"TMPDIR": str(temporary)}
    with started([*LONG, "--run_dir", run_dir], output, ["taskset", "-c", core], environment) as process:
        wait_for(process, output, "\nstep 10/")
        assert {num_threads(process, run_dir, name) for name in ("trainer", "generator-0")} == {1}
        until(lambda: any(step.get("reward/errors/timeout") for step in read_metrics(run_dir)))
        time.sleep(5.0)  # until what such a reward left behind has ended
        ended = zombies(process.pid)
        until(lambda: not ended & zombies(process.pid))
        assert leftovers(temporary, process.pid)
        process.kill()
        process.wait()
    until(lambda: not leftovers(temporary, process.pid))


@as_root
def test_a_cgroup_of_six_gib_and_one_core(tmp_path):
    output, run_dir = tmp_path / "output", tmp_path / "run"
    with memory_cgroup(6 * 2**30, cores=1.0) as enter:
        planned = subprocess.run(
            [sys.executable, "-m", "rl.cli", "plan", "quickstart"],
            cwd=ROOT,
            preexec_fn=enter,
            capture_output=True,
            text=True,
        )
        host = next(line for line in planned.stdout.splitlines() if line.startswith("host:"))
        assert float(host.split(" of ")[1].split()[0]) <= 6, planned.stdout
        with started([*QUICK, "--run_dir", run_dir], output, preexec_fn=enter) as process:
            wait_for(process, output, "step 0:")
            assert {num_threads(process, run_dir, name) for name in ("trainer", "generator-0")} == {1}
            assert process.wait(300) == 0, output.read_text()
    assert [step["step"] for step in read_metrics(run_dir)] == [0, 1]


@contextmanager
def small_disk(directory, kib):
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@as_root
@pytest.mark.parametrize("kib", [16, 1024])
def test_a_run_directory_on_a_full_file_system(kib, tmp_path):
    """Full before the run, and full once it has started."""
    output = tmp_path / "output"
    with small_disk(tmp_path / "disk", kib) as disk:
        if kib == 16:
            (disk / "full").write_bytes(bytes(16 * 1024))
        with started([*QUICK, "--run_dir", disk / "run"], output) as process:
            assert process.wait(200) in (1, 2), output.read_text()
    (line,) = [line for line in output.read_text().splitlines() if line.startswith("rl: error:")]
    assert "No space left" in line or ("is full" in line and "; make room" in line), line
    assert "Traceback" not in output.read_text()


HELPERS = """
from rl.envs.sort_letters import SortLetters


class Lenient(SortLetters):
    def reward(self, problem, response, stop):
        return 0.25
"""
RECIPE = """
from dataclasses import replace
from configs.quickstart import quickstart
from helpers.envs import Lenient


def mine():
    return replace(quickstart(), env=Lenient(num_eval=8))
"""


def test_a_package_beside_the_recipe(tmp_path):
    output, folder = tmp_path / "output", tmp_path / "recipes"
    (folder / "helpers").mkdir(parents=True)
    (folder / "helpers" / "__init__.py").touch()
    (folder / "helpers" / "envs.py").write_text(HELPERS)
    (folder / "mine.py").write_text(RECIPE)
    arguments = ["train", f"{folder / 'mine.py'}:mine", *TRAIN, "--steps", "1", "--eval_every", "1"]
    with started([*arguments, "--run_dir", tmp_path / "run"], output) as process:
        assert process.wait(200) == 0, output.read_text()
    rewards = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0.25 in [metrics.get("reward/mean") for metrics in rewards]


def test_what_asks_all_processes_of_a_job_to_end_leaves_a_checkpoint(tmp_path):
    """As LSF does, and systemd, and Slurm with proctrack/linuxproc."""
    process = start(
        "train", "tests/recipes.py:mortal", "--run_dir", tmp_path / "run", "--save_every", 0, "--steps", 500
    )
    wait_for_line(process, "step 1/")
    for each in [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (
        process.returncode == 128 + signal.SIGTERM and "interrupted: saving a checkpoint of step " in output
    ), output
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (saved / "record.json").exists()
    assert not shared_leftovers()
