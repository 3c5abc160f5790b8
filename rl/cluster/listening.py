"""What the processes of running servers, runs and workers listen on, by the sockets that they have open."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl.actors.births import mesh_of
from rl.host_protocol import OWN_HOST, written

_SHOWN = 60  # characters of a command


@dataclass(frozen=True)
class Listener:
    """One process. `addresses`: host:port, sorted."""

    name: str
    pid: int
    addresses: tuple[str, ...]
    num_abstract: int  # Unix sockets without a file, to which every user of the host may connect


def listeners() -> list[Listener]:
    """Of all servers, runs and workers of this user on this host: each first, then its processes."""
    sockets = []
    for parent in sorted(_parents()):
        with suppress(psutil.Error, OSError):  # it has ended meanwhile
            process = psutil.Process(parent)
            sockets.append(_listener(_command(process), process))
            for child in process.children(recursive=True):
                with suppress(psutil.Error, OSError):
                    sockets.append(_listener(_log_of(child) or child.name(), child))
    return [listener for listener in sockets if listener.addresses or listener.num_abstract]


def _parents() -> set[int]:
    """Controllers that have started a mesh which lives here, and the host's workers."""
    parents = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if _is_worker(process):
                parents.add(process.pid)
            elif (mesh := mesh_of(process)) and OWN_HOST not in process.environ():
                parents.add(int(mesh.partition("-")[0]))
    return parents


def _is_worker(process: psutil.Process) -> bool:
    """An `rl worker`, however it was started."""
    words = process.cmdline()[1:]
    of_module = words[words.index("-m") :][:3] if "-m" in words else []  # behind Python's own flags, as -P
    return of_module == ["-m", "rl", "worker"] or [Path(word).name for word in words[:2]] == ["rl", "worker"]


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
