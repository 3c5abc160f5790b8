"""Hosts on one machine: each with its own network, mounts, processes, name and /dev/shm. They need root.

`python -m tests.hosts.namespaces 2 COMMAND ...` runs a command on the first, with an `rl worker` on each; in
its words {hosts} is the setting's value.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl.host_protocol import ask

PORT = 7000
TMPDIR = "/dev/shm/tmp"
"""Of each host: in what no other has."""
_START_SECONDS = 60.0
_INIT = """
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.2)
"""
"""A host's first process: it reaps orphans, as init does; Slurm waits for what has ended and was not reaped."""


@dataclass
class Host:
    """A host. `pid`: of its first process, whose end is the host's."""

    name: str
    number: int
    address: str
    pid: int
    core: int
    has_worker: bool = False

    @property
    def worker_address(self) -> str:
        return f"{self.address}:{PORT}"

    def command(self, *words: str) -> list[str]:
        """What runs the words there."""
        inside = ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-u", "-i"]
        return [*inside, "env", "-C", os.getcwd(), "taskset", "-c", str(self.core), *words]

    def start(self, *words: str, env: Mapping[str, str] | None = None, **how) -> subprocess.Popen:
        environment = {**os.environ, "TMPDIR": TMPDIR, **(env or {})}
        return subprocess.Popen(self.command(*words), env=environment, start_new_session=True, **how)

    def output(self, *words: str) -> str:
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True).stdout

    def cut(self) -> None:
        """Its link is down."""
        _ip("link", "set", f"{self.name}-out", "down")

    def heal(self) -> None:
        _ip("link", "set", f"{self.name}-out", "up")

    def processes(self) -> list[psutil.Process]:
        """All that run there but its first one, seen from outside."""
        namespace, inside = os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == namespace and process.pid != self.pid:
                    inside.append(process)
        return inside


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def hosts(count: int, unshared: Sequence[Path] = ()) -> Iterator[list[Host]]:
    """They see the machine's files, but for /dev/shm. unshared: directories that are each host's own."""
    number = os.getpid() % 200 + 20
    bridge, subnet = f"rl{number}", f"10.77.{number}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        made = []
        for i in range(count):
            host = _start_host(f"{bridge}h{i}", i, f"{subnet}.{i + 1}", unshared)
            stack.callback(_end, host)
            name = host.name
            _ip(
                "link",
                "add",
                f"{name}-out",
                "type",
                "veth",
                "peer",
                "name",
                f"{name}-in",
                "netns",
                str(host.pid),
            )
            stack.callback(_ip, "link", "del", f"{name}-out")  # by itself it goes some time after the host
            _ip("link", "set", f"{name}-out", "master", bridge, "up")
            for words in (["link", "set", "lo", "up"], ["addr", "add", f"{host.address}/24", "dev", f"{name}-in"],
                          ["link", "set", f"{name}-in", "up"]):  # fmt: skip
                host.output("ip", *words)
            made.append(host)
        yield made


def _start_host(name: str, number: int, address: str, unshared: Sequence[Path]) -> Host:
    own = "; ".join(f"mount -t tmpfs tmpfs {path}" for path in ["/dev/shm", *map(str, unshared)])
    script = f"hostname {name}; {own}; mkdir {TMPDIR}; echo ready; exec {sys.executable} -S -c '{_INIT}'"
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--uts", "--ipc", "--kill-child", "--mount-proc",
         "sh", "-c", script],
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    (first,) = psutil.Process(process.pid).children()
    return Host(name, number, address, first.pid, number % (os.cpu_count() or 1))


def _end(host: Host) -> None:
    """Whose first process ends, all of a namespace ends."""
    parent = psutil.Process(host.pid).parent()
    with suppress(ProcessLookupError):
        os.kill(host.pid, signal.SIGKILL)
    if parent is not None:
        os.waitpid(parent.pid, 0)


@contextmanager
def worker(
    host: Host, log: Path, env: Mapping[str, str] | None = None, join: Host | None = None, waits: bool = True
) -> Iterator[subprocess.Popen]:
    """An `rl worker` there, once it answers, or at once. join: the host whose runs it joins."""
    flags = ["--join", join.worker_address] if join else []
    with log.open("ab") as file:
        process = host.start(
            sys.executable, "-m", "rl", "worker", "--listen", host.worker_address, *flags, env=env,
            stdout=file, stderr=file, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        if waits:
            wait_for_worker(host)
        yield process
    finally:
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.terminate()
        process.terminate()
        process.wait(30)


def wait_for_worker(host: Host) -> None:
    """Asked from the first host's network would be as good: the bridge has an address of its own."""
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            ask(host.worker_address, {"do": "look"}, 5.0)[1].close()
            return
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def main() -> None:
    count, *words = sys.argv[1:]
    with hosts(int(count)) as made, ExitStack() as stack:
        for host in made:
            stack.enter_context(worker(host, Path("/dev/null")))
        text = ",".join(host.worker_address for host in made)
        process = made[0].start(*(word.replace("{hosts}", text) for word in words))
        sys.exit(process.wait())


if __name__ == "__main__":
    main()
