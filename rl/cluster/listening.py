"""What the processes of running servers and runs listen on, by the sockets that they have open."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl.actors.births import mesh_of
from rl.host_protocol import written

_SHOWN = 60  # characters of a command


@dataclass(frozen=True)
class Listener:
    """One process. `addresses`: host:port, sorted."""

    name: str
    pid: int
    addresses: tuple[str, ...]
    num_abstract: int  # Unix sockets without a file, to which every user of the host may connect


def listeners() -> list[Listener]:
    """Of all servers and runs of this user on this host: the controller first, then its processes."""
    found = []
    for controller in sorted(_controllers()):
        with suppress(psutil.Error, OSError):  # it has ended meanwhile
            process = psutil.Process(controller)
            found.append(_listener(_command(process), process))
            for child in process.children(recursive=True):
                with suppress(psutil.Error, OSError):
                    found.append(_listener(_log_of(child) or child.name(), child))
    return [listener for listener in found if listener.addresses or listener.num_abstract]


def _controllers() -> set[int]:
    """Processes that have started a mesh which lives."""
    meshes = filter(None, map(mesh_of, psutil.process_iter()))
    return {int(mesh.partition("-")[0]) for mesh in meshes}


def _listener(name: str, process: psutil.Process) -> Listener:
    listening = (c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    unix = {c.laddr for c in process.net_connections("unix") if c.laddr.startswith("@")}
    return Listener(name, process.pid, tuple(sorted({written(*place) for place in listening})), len(unix))


def _command(process: psutil.Process) -> str:
    """As it was typed, about."""
    program, *arguments = process.cmdline()[1:] or [process.name()]
    return " ".join([Path(program).name, *arguments])[:_SHOWN]


def _log_of(process: psutil.Process) -> str:
    """The name of the log that it writes, which is its mesh's and rank's."""
    path = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
    return path.stem if path.suffix == ".log" else ""
