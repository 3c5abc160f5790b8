"""The run's directory in shared memory: owned by a lock, gone with its owner."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from rl.cluster.shared_directory import remove_unowned, shared_directory

HOLD = """
import sys, time
from pathlib import Path
from rl.cluster.shared_directory import shared_directory
with shared_directory("run", Path(sys.argv[1])) as path:
    (path / "weights.bin").write_bytes(b"0")
    Path(str(path) + "-vllm").touch()
    print("made", flush=True)
    time.sleep(60)
"""


def hold(root):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(root)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"made\n"
    return process


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def wait_empty(root):
    deadline = time.monotonic() + 5
    while list(root.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not list(root.iterdir())


def test_it_goes_with_all_whose_name_begins_so(tmp_path):
    with shared_directory("run", tmp_path) as path:
        (path / "weights.bin").touch()
        path.with_name(path.name + "-other").touch()
    assert not list(tmp_path.iterdir())


def test_temporary_files_of_its_name_go_too(tmp_path):
    """A generator that is killed cannot remove its adapters."""
    with shared_directory("run", tmp_path) as path:
        Path(tempfile.mkdtemp(prefix=f"{path.name}-adapters-"), "weights").touch()
        name = path.name
    process = hold(tmp_path)
    killed = min(made.name for made in tmp_path.iterdir())
    tempfile.mkdtemp(prefix=f"{killed}-adapters-")
    end(process)
    assert wait_empty(tmp_path)
    assert not [p for p in Path(tempfile.gettempdir()).iterdir() if p.name.startswith((name, killed))]


def test_another_runs_directory_stays_even_where_its_process_number_means_nothing(tmp_path):
    """As of two containers that share memory: the pid of one is nobody, or somebody else, in the other."""
    with shared_directory("theirs", tmp_path) as theirs:
        foreign = theirs.with_name(theirs.name.replace(f"rl-{os.getpid()}-", "rl-4194305-"))
        theirs.rename(foreign)
        with shared_directory("ours", tmp_path):
            assert foreign.is_dir()
        assert foreign.is_dir()
        foreign.rename(theirs)


def test_a_killed_run_leaves_nothing(tmp_path):
    process = hold(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    end(process)
    assert wait_empty(tmp_path)


def test_the_next_run_removes_what_was_left_where_everything_was_killed(tmp_path):
    process = hold(tmp_path)
    for janitor in psutil.Process(process.pid).children():
        janitor.kill()
    end(process)
    time.sleep(0.1)
    assert list(tmp_path.iterdir())
    remove_unowned(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_run_name_that_is_long_or_has_patterns_in_it(tmp_path):
    with shared_directory("[a]*" + "x" * 250, tmp_path) as path:
        (path / "weights.bin").touch()
    assert not list(tmp_path.iterdir())
