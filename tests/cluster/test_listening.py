"""What `rl doctor` says that running processes listen on: real sockets of a process that looks like a run's."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from rl import doctor
from rl.actors.births import Births
from rl.cluster import listening
from rl.cluster.listening import listeners

PROGRAM = """
import os, socket, sys
log = os.open("generator-7.log", os.O_WRONLY | os.O_CREAT)
four = socket.create_server(("127.0.0.1", 0))
every = socket.create_server(("::", 0), family=socket.AF_INET6)
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0" + "rl-test-" + str(os.getpid()))
client = socket.create_connection(four.getsockname())
print(four.getsockname()[1], every.getsockname()[1], flush=True)
os.dup2(log, 1)
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
"""


LISTENS = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""
WORKER = f'subprocess.run([sys.executable, "-S", "-c", {LISTENS!r}])'


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_the_processes_of_a_run_are_listed_with_what_they_listen_on(tmp_path, capsys):
    environment = {**os.environ, **Births("generator-7").expect(1)}
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    try:
        ports = child.stdout.readline().split()
        assert child.stderr.readline() == "ready\n"
        (listener,) = (one for one in listeners() if one.pid == child.pid)
        assert listener.name == "generator-7" and listener.num_abstract == 1
        assert listener.addresses == (f"127.0.0.1:{ports[0]}", f"[::]:{ports[1]}")
        doctor._listening()
        line = (
            f"generator-7 (pid {child.pid}): 127.0.0.1:{ports[0]}, [::]:{ports[1]}, 1 abstract Unix socket\n"
        )
        assert line in capsys.readouterr().out
    finally:
        child.communicate()
    assert not [one for one in listeners() if one.pid == child.pid]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_a_worker_is_listed_with_what_it_has_started_for_another_hosts_run(tmp_path):
    """A process that a worker started names its controller's number, which here is somebody else's."""
    stranger = subprocess.Popen([sys.executable, "-S", "-c", LISTENS], stdout=subprocess.PIPE, text=True)
    program = tmp_path / "rl"
    program.write_text(f"#!{sys.executable}\nimport subprocess, sys\n{WORKER}")
    program.chmod(0o755)
    worker = subprocess.Popen(
        [program, "worker", "--listen", "10.0.0.2:7000"],
        env={**os.environ, "RL_HOST": "10.0.0.2:7000", "RL_MESH": f"{stranger.pid}-3"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        ports = [process.stdout.readline().strip() for process in (stranger, worker)]
        found = {one.pid: one for one in listeners()}
        assert stranger.pid not in found and ports[0]
        (child,) = psutil.Process(worker.pid).children()
        assert found[child.pid].addresses == (f"127.0.0.1:{ports[1]}",)
    finally:
        for process in (stranger, worker):
            for each in psutil.Process(process.pid).children():
                each.kill()
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("command", "is_worker"),
    [
        ("python -m rl worker --listen 10.0.0.2:7000", True),
        ("python -P -m rl worker --listen 10.0.0.2:7000", True),
        ("python /env/bin/rl worker --listen 10.0.0.2:7000", True),
        ("python -P -m rl train worker", False),
        ("grep -m rl", False),
        ("", False),
    ],
)
def test_a_worker_is_known_however_it_was_started(command, is_worker):
    assert listening._is_worker(SimpleNamespace(cmdline=command.split)) is is_worker
