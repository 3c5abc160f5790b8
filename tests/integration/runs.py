"""Whole runs as a user starts them, watched from outside: what they print, write, and keep in shared memory."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil

from rl.owned_directory import SHARED_MEMORY
from tests.devices import with_all

ROOT = Path(__file__).parent.parent.parent
MAX_VERSIONS = 3


class SharedVersions(threading.Thread):
    """Lists a run's directory in shared memory all the while: the most versions of one name that it ever held."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.pid, self.most, self.seen, self._over = pid, 0, set(), threading.Event()
        self.start()

    def run(self):
        while not self._over.is_set():
            names = [p.stem for d in SHARED_MEMORY.glob(f"rl-*/{self.pid}-*") for p in d.glob("*.bin")]
            there = {name.rsplit("-rank", 1)[0] for name in names}
            of_each = Counter(name.rsplit("-v", 1)[0] for name in there)
            self.most = max(self.most, *of_each.values(), 0)
            self.seen |= there
            time.sleep(0.005)

    def stop(self):
        self._over.set()
        self.join()


def rl(*arguments, timeout=400, directory=ROOT):
    """A run to its end.

    directory: where it is started, as the `rl` command is: no module is taken from there.

    However often it publishes, shared memory holds three versions of a name at most.
    """
    process = start(*arguments, stderr=subprocess.PIPE, directory=directory)
    versions = SharedVersions(process.pid)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        versions.stop()
        if process.poll() is None:
            process.kill()
    assert versions.most <= MAX_VERSIONS, versions.most
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, module="rl.cli", directory=ROOT):
    safe = [] if directory == ROOT else ["-P"]
    command = [sys.executable, *safe, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, cwd=directory, env=with_all(), stdout=stdout, stderr=stderr, text=True)


def wait_for_line(process, beginning):
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"the run ended before it printed {beginning!r}")


def pid_of(process, run_dir, name):
    """The process that writes to this log; a reward function's own process, a grandchild, writes to the same."""
    log = str((run_dir / "logs" / f"{name}.log").resolve())
    (pid,) = [
        c.pid
        for c in psutil.Process(process.pid).children()
        if os.path.realpath(f"/proc/{c.pid}/fd/1") == log
    ]
    return pid


def shared_leftovers():
    """Of runs whose controller is gone."""
    root = f"rl-{os.getuid()}/*"
    owned = [*SHARED_MEMORY.glob(root), *Path(tempfile.gettempdir()).glob(root)]
    return [path.name for path in owned if not psutil.pid_exists(int(path.name.split("-")[0]))]


def read_metrics(run_dir):
    """One dictionary a step, with its evaluation."""
    steps = defaultdict(dict)
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        steps[metrics["step"]] |= metrics
    return [steps[step] for step in sorted(steps)]
