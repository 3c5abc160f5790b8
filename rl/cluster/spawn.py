"""Spawning processes on this host: their environment, device, log and rendezvous; and ending all of them."""

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore

from rl.cluster.environment import kernel_cache

GROUP_ENVIRONMENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Of processes that join a group: each connects to the launcher's store, and none opens its own."""
_LOOPBACK = "127.0.0.1"


def spawn_procs(
    host: Any, name: str, num_procs: int, env: Mapping[str, str], devices: Sequence[int], log: Path
) -> Any:
    """A mesh on a host mesh, with the one dimension `procs`; each process with one GPU, if any.

    devices: of each process, its GPU's number among the visible.
    A mesh of one writes to `<log>.log`, each rank of a larger one to `<log>-<rank>.log`.
    """
    from monarch.actor import default_bootstrap_cmd

    names = visible_devices()

    def command(point: Any) -> Any:
        device = kernel_cache()
        if names:
            device["CUDA_VISIBLE_DEVICES"] = names[devices[point.rank]] if devices else ""
        return default_bootstrap_cmd().with_env(dict(env) | device)

    return host.spawn_procs(
        per_host={"procs": num_procs},
        name=name,
        bootstrap=_prepare_process(str(log.resolve()), num_procs > 1, list(sys.path)),
        bootstrap_command=command,
    )


def visible_devices() -> list[str]:
    """What each GPU of this process is called in CUDA_VISIBLE_DEVICES: its number, or its UUID."""
    if not torch.cuda.is_available():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [name.strip() for name in given.split(",")][:count] if given else [str(i) for i in range(count)]


def _prepare_process(log: str, with_rank: bool, path: list[str]) -> Callable[[], None]:
    """What each new process runs first. path: where it finds modules: where this process does."""

    def prepare() -> None:
        import os
        import sys
        from contextlib import suppress

        from monarch.actor import current_rank

        from rl.processes import end_with_parent

        sys.path[:] = [*path, *(place for place in sys.path if place not in path)]
        end_with_parent()
        with suppress(PermissionError):  # it leads a session already
            os.setsid()  # Ctrl-C is for the controller, which needs this process to save a checkpoint
        name = f"{log}-{current_rank().rank}.log" if with_rank else f"{log}.log"
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)

    return prepare


async def join_group(procs: Any) -> TCPStore:
    """Give the processes what torch.distributed's rendezvous reads. They need GROUP_ENVIRONMENT.

    Returns the store they meet in, which their owner keeps as long as they live. It listens on the loopback
    interface alone: a store that opens its own port listens on every address, whatever host it is given.
    """
    from monarch.spmd import setup_torch_elastic_env_async

    with socket.create_server((_LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    await setup_torch_elastic_env_async(procs, _LOOPBACK, port)
    return store


def kill_those_that_log_to(log: Path) -> None:
    """End what is left of an earlier mesh of this name, also a rank that never answered."""
    name = re.compile(re.escape(str(log.resolve())) + r"(-\d+)?\.log")
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError, psutil.NoSuchProcess):
            if name.fullmatch(os.readlink(f"/proc/{child.pid}/fd/1")):
                child.kill()


def kill_children(others: set[int]) -> None:
    """End every descendant but `others`.

    Twice, because orphans of those that end become children of this process.
    """
    for _ in range(2):
        children = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=2)
