"""What the operating system says of processes."""

import os
import signal
import socket
import subprocess
import time

from rl.processes import is_gone, is_stopped
from rl.types import ProcessInfo


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
