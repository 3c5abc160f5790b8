"""What a host has. Plain data, so that a plan or a test can stand in for a host that is not here."""

import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache

import psutil

from rl.cgroups import core_quota, memory_left, memory_limit
from rl.errors import ConfigError

_CAPABILITIES = {
    "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "A6000": (8, 6), "L4": (8, 9), "L40S": (8, 9),
    "RTX4090": (8, 9), "H100": (9, 0), "H200": (9, 0), "B200": (10, 0), "RTX5090": (12, 0),
}  # fmt: skip
_USABLE = 0.985  # a card sold with 80 GB shows 79.6 GiB, one with 24 GB 23.6, one with 141 GB 139.8


@dataclass(frozen=True)
class GPU:
    """One GPU. `gib`: its memory in all. `capability`: the compute capability, as (9, 0) for an H100."""

    name: str
    gib: float
    capability: tuple[int, int]


_MOST_GB = 1000  # of a GPU


@dataclass(frozen=True)
class Machine:
    """One host, as far as this process may use it. `free_gib`: of its own memory, not the GPUs'."""

    num_cores: int
    free_gib: float
    gpus: tuple[GPU, ...] = ()


def num_cores() -> int:
    """Cores that this process may use: by affinity, and by its cgroup's quota, rounded up."""
    # macOS has no affinity.
    by_affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota()
    return by_affinity if math.isinf(quota) else max(1, min(by_affinity, math.ceil(quota)))


def free_memory() -> int:
    """Bytes that this process may still take: of the host's, and of its cgroup's limit."""
    return int(min(psutil.virtual_memory().available, memory_left()))


def total_memory() -> int:
    """Bytes that this process may take in all."""
    return int(min(psutil.virtual_memory().total, memory_limit()))


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """The one this process runs on, as it was when first asked, with the GPUs that it is shown."""
    import torch  # 2 s

    gpus = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(i)
        gpus.append(GPU(found.name, found.total_memory / 2**30, (found.major, found.minor)))
    return Machine(num_cores(), free_memory() / 2**30, tuple(gpus))


def parse_machine(text: str) -> Machine:
    """ "8xH100-80": eight H100 of 80 GB each; "cpu": this machine without GPUs. Raises ConfigError."""
    here = this_machine()
    if text == "cpu":
        return Machine(here.num_cores, here.free_gib)
    found = re.fullmatch(r"(?:(\d{1,4})x)?([A-Za-z]\w*)-(\d{1,4})", text)
    if found is None or found[1] == "0" or found[2].upper() not in _CAPABILITIES:
        raise ConfigError(
            f"--devices {text!r} is not understood; write 8xH100-80 (number, kind, GB), or cpu; kinds: "
            f"{', '.join(_CAPABILITIES)}"
        )
    name = found[2].upper()
    if not 0 < int(found[3]) <= _MOST_GB:
        raise ConfigError(f"--devices {text!r}: no GPU has {found[3]} GB; write its memory, as 8xH100-80")
    gpu = GPU(name, int(found[3]) * _USABLE, _CAPABILITIES[name])
    count = int(found[1] or 1)
    return Machine(16 * count, 128.0 * count, (gpu,) * count)
