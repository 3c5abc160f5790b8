"""Ends: of processes below this one."""

import os
import re
from contextlib import suppress
from pathlib import Path

import psutil


def kill_those_that_log_to(log: Path) -> None:
    """End descendants that write to LOG.log or LOG-RANK.log: what is left of an earlier mesh.

    log: that path without its ending.
    """
    name = re.compile(re.escape(str(log.resolve())) + r"(-\d+)?\.log")
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError, psutil.NoSuchProcess):
            if name.fullmatch(os.readlink(f"/proc/{child.pid}/fd/1")):
                child.kill()


def kill_children(spared: set[int]) -> None:
    """End every descendant but `spared`.

    Twice, because orphans of those that end become children of this process.
    """
    for _ in range(2):
        children = [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=2)
