"""What `rl doctor` says that running processes listen on: real sockets of a process that looks like a run's."""

import os
import subprocess
import sys

import pytest

from rl import doctor
from rl.actors.births import Births
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
