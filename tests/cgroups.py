"""Cgroups made by hand, of whichever version the machine has. For root alone."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


@contextmanager
def memory_cgroup(limit: int, cores: float = 0.0) -> Iterator[Callable[[], None]]:
    """A function with which a process enters a cgroup of so many bytes, and cores' time where it is not 0."""
    is_v2 = (_MOUNT / "cgroup.controllers").exists()
    name = f"rl-test-{os.getpid()}"
    if is_v2:
        folders = [_MOUNT / name]
        (_MOUNT / "cgroup.subtree_control").write_text("+memory +cpu")
        files = {folders[0] / "memory.max": limit}
        files |= {folders[0] / "cpu.max": f"{int(cores * 100000)} 100000"} if cores else {}
    else:
        folders = [_MOUNT / "memory" / name, *([_MOUNT / "cpu" / name] if cores else [])]
        files = {folders[0] / "memory.limit_in_bytes": limit}
        files |= {folders[-1] / "cpu.cfs_quota_us": int(cores * 100000)} if cores else {}
    for folder in folders:
        folder.mkdir()

    def enter() -> None:
        for folder in folders:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    try:
        for path, content in files.items():
            path.write_text(str(content))
        yield enter
    finally:
        for folder in folders:
            _remove(folder)


def _remove(folder: Path) -> None:
    """A process that has just ended is still listed for a moment."""
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)
