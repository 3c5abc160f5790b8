"""Spawning processes: their environment, device, log and rendezvous."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from rl.host_protocol import listen
from rl.processes import PARENT

GROUP_ENVIRONMENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Of processes that join a group: each connects to the launcher's store, and none opens its own."""


class Procs:
    """A mesh of processes, counted along one dimension, `procs`, whatever hosts they are on."""

    def __init__(self, mesh: Any):
        self.mesh = mesh

    def spawn(self, name: str, actor: type, *arguments: Any) -> Any:
        """An actor in each process."""
        return self.mesh.spawn(name, actor, *arguments).flatten("procs")

    async def stop(self, why: str) -> None:
        await self.mesh.stop(why)


def spawn_procs(
    hosts: Any, name: str, environments: Sequence[Mapping[str, str]], per_host: int, log: Path
) -> Procs:
    """Processes on a host mesh, on each host as many.

    environments: of each process, beside what it inherits.
    A mesh of one writes to `<log>.log`, each rank of a larger one to `<log>-<rank>.log`: first its host.
    """
    from monarch.actor import default_bootstrap_cmd

    def command(point: Any) -> Any:
        bootstrap = default_bootstrap_cmd()
        bootstrap.args = ["-P", *bootstrap.args]  # a datasets.py in the working directory is not the library
        return bootstrap.with_env(environments[point.rank])

    mesh = hosts.spawn_procs(
        per_host={"procs": per_host},
        name=name,
        bootstrap=_prepare_process(str(log.absolute()), len(environments) > 1, list(sys.path)),
        bootstrap_command=command,
    )
    return Procs(mesh)


def _prepare_process(log: str, with_rank: bool, path: list[str]) -> Callable[[], None]:
    """What each new process runs first. path: where it finds modules: where this process does."""
    controller = os.getpid()

    def prepare() -> None:
        import os
        import sys
        import time
        from contextlib import suppress

        sys.path[:] = [*path, *(place for place in sys.path if place not in path)]

        from monarch.actor import current_rank

        from rl.host_protocol import own_host
        from rl.processes import end_with_parent, outlive_interrupts

        end_with_parent()
        outlive_interrupts()
        if os.getppid() != int(os.environ.get(PARENT, controller)):
            os._exit(1)  # the parent ended before this process asked to end with it
        with suppress(PermissionError):  # it leads a session already
            os.setsid()  # Ctrl-C is for the controller, which needs this process to save a checkpoint
        rank = current_rank().rank
        file = os.open(
            f"{log}-{rank}.log" if with_rank else f"{log}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(file, 1)
        os.dup2(file, 2)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # a full disk costs the log, and nothing else
            os.write(1, f"{now} host {own_host()}, rank {rank}: process {os.getpid()} starts\n".encode())

    return prepare


async def join_group(procs: Procs, address: str) -> TCPStore:
    """Give the processes what torch.distributed's rendezvous reads. They need GROUP_ENVIRONMENT.

    address: this process's, as theirs reach it. Returns the store they meet in, which their owner keeps as
    long as they live. It listens on this address alone: a store that opens its own port listens on every
    address, whatever host it is given.
    """
    from monarch.spmd import setup_torch_elastic_env_async

    with listen(address) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    await setup_torch_elastic_env_async(procs.mesh, address, port)
    return store
