"""What the operating system says of processes."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from rl.processes import ProcessInfo, is_gone, is_stopped


def test_a_process_that_stands_still_is_told_from_one_that_runs_waits_or_is_gone():
    child = subprocess.Popen(["sleep", "60"])
    info = ProcessInfo(child.pid, socket.gethostname(), "cpu")
    try:
        assert not is_stopped(info)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.05)
        assert is_stopped(info) and not is_stopped(ProcessInfo(child.pid, "another host", "cpu"))
        os.kill(child.pid, signal.SIGCONT)
        time.sleep(0.05)
        assert not is_stopped(info) and not is_gone(info)
    finally:
        child.kill()
    time.sleep(0.2)
    assert is_gone(info)  # though nobody has waited for it
    child.wait()
    assert is_gone(info) and not is_stopped(info)
    assert not is_gone(ProcessInfo(child.pid, "another host", "cpu"))


def test_a_frozen_heap_ends_quietly():
    """nanobind, of triton's modules, writes dozens of lines where its objects are there at the end."""
    pytest.importorskip("triton")
    code = "import triton, gc; from rl.processes import freeze_heap; freeze_heap(); print(gc.get_freeze_count() > 1000)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
