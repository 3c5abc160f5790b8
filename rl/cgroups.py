"""What cgroups, version 1 or 2, let this process have: cores and memory; and how often the kernel killed."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MOUNT = Path("sys/fs/cgroup")


def core_quota(root: Path = Path("/")) -> float:
    """Cores' worth of time that this process may take; infinity where there is no quota."""
    quotas = [float("inf")]
    for level in _levels(root, "cpu"):
        quota, period = [*_words(level / "cpu.max"), "max", "0"][:2]  # version 2
        if quota == "max":
            quota, period = _first(level / "cpu.cfs_quota_us", "-1"), _first(level / "cpu.cfs_period_us", "0")
        if int(quota) > 0 and int(period) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas)


def memory_limit(root: Path = Path("/")) -> float:
    """The smallest limit over this process, bytes; infinity where there is none."""
    return min((limit for limit, _ in _memory(root)), default=float("inf"))


def memory_left(root: Path = Path("/")) -> float:
    """What this process and those beside it may still take before a limit, bytes: files' pages make room."""
    return max(0.0, min((limit - used for limit, used in _memory(root)), default=float("inf")))


def num_killed(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for lack of memory: of this cgroup, else of this host."""
    for level in _levels(root, "memory"):
        for counters in (level / "memory.events", level / "memory.oom_control"):
            if counters.exists():
                return _counter(counters, "oom_kill")
    return _counter(root / "proc/vmstat", "oom_kill")


def _memory(root: Path) -> Iterator[tuple[float, int]]:
    """Limit and use of each level that has a limit, bytes."""
    for level in _levels(root, "memory"):
        for limit, used, files in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            # Version 1 says "no limit" by a number of 2^63, less a page.
            if (most := _first(level / limit, "max")) != "max" and int(most) < 2**62:
                in_use = int(_first(level / used, "0"))
                yield float(most), in_use - min(in_use, _counter(level / "memory.stat", files))


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's cgroup and of those around it, under either version.

    In a container its own cgroup may be what is mounted, while the kernel's list has another path: of that
    path only the mount exists then.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [root / _MOUNT, root / _MOUNT / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / _MOUNT / controllers, root / _MOUNT / controller]
        else:
            continue
        names = [name for name in path.split("/") if name not in ("", "..")]
        for mount in mounts:
            for depth in range(len(names), -1, -1):
                if (level := mount.joinpath(*names[:depth])).is_dir():
                    yield level


def _counter(path: Path, name: str) -> int:
    """The number after a name; 0 where there is none."""
    pairs = (line.split() for line in _lines(path))
    return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == name), 0)


def _first(path: Path, default: str) -> str:
    return (_words(path) or [default])[0]


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text().splitlines()
    return []
