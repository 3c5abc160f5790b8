"""Code that a model wrote: each attack is refused or contained. Each would succeed outside (the control)."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl.envs import sandbox
from rl.envs.sandbox import NoSandbox, Sandbox, why_no_sandbox

BOX = Sandbox(seconds=5.0, memory_mib=256, max_processes=16)

NETWORK = "import socket; socket.create_connection(('127.0.0.1', {port}), timeout=2); print('GOT OUT')"
ATTACKS = {
    "the host's files": "print('GOT OUT', open({secret!r}).read())",
    "/etc/passwd": "print('GOT OUT', open('/etc/passwd').read())",
    "a link out of the directory": "import os; os.symlink({secret!r}, 'x'); print('GOT OUT', open('x').read())",
    "the network": NETWORK,
    "the parent": "import os; os.kill({pid}, 0); print('GOT OUT')",
    "the environment": "import os; print('GOT OUT' if 'SECRET_KEY' in os.environ else 'nothing')",
    "the system's files": "open('/usr/bin/new', 'w'); print('GOT OUT')",
    "10 GB of memory": "x = bytearray(10 * 2**30); print('GOT OUT')",
    "a huge file": "f = open('x', 'wb')\nfor _ in range(600): f.write(bytes(2**20))\nf.flush(); print('GOT OUT')",
}


@pytest.fixture
def facts(tmp_path, monkeypatch):
    import socket

    monkeypatch.setenv("SECRET_KEY", "x")
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"secret": str(secret), "port": server.getsockname()[1], "pid": os.getpid()}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_nowhere(name, facts):
    ran = BOX.run_python(ATTACKS[name].format(**facts))
    assert "GOT OUT" not in ran.stdout
    assert not ran.ok or ran.stdout == "nothing\n"


@pytest.mark.parametrize("name", [n for n in ATTACKS if n not in ("the system's files", "10 GB of memory", "a huge file")])  # fmt: skip
def test_without_the_sandbox_it_would(name, facts, tmp_path):
    """What must fail inside does work outside, so that the tests above can fail."""
    done = subprocess.run(
        [sys.executable, "-c", ATTACKS[name].format(**facts)], capture_output=True, text=True, cwd=tmp_path
    )
    assert "GOT OUT" in done.stdout


def test_a_fork_bomb_is_contained_and_nothing_is_left():
    code = "import os\nmade = 0\ntry:\n  while True:\n    if os.fork() == 0:\n      while True: pass\n    made += 1\nexcept OSError: print(made)"
    began = time.monotonic()
    box, files = Sandbox(seconds=1.5, max_processes=16), {"fork_bomb.py": code}
    ran = box.run([os.path.realpath(sys.executable), "-I", "fork_bomb.py"], files=files)
    assert time.monotonic() - began < 6
    assert ran.cause == "processes" and not ran.ok
    time.sleep(0.5)
    assert not [p for p in psutil.process_iter(["cmdline"]) if "fork_bomb.py" in (p.info["cmdline"] or [])]


def test_time_and_output_are_limited():
    ran = Sandbox(seconds=0.7).run_python("while True: pass")
    assert (ran.cause, ran.ok) == ("time", False)
    ran = Sandbox(seconds=5, max_output=1000).run_python("while True: print('x' * 100)")
    assert ran.cause == "output" and len(ran.stdout) == 1000


def test_what_it_is_for_works():
    ran = BOX.run_python("import sys, helper; print(helper.double(int(sys.stdin.read())))", "21", {"helper.py": "double = lambda x: 2 * x"})  # fmt: skip
    assert not ran.ok and "helper" in ran.stderr  # -I: nothing is imported from the directory
    ran = BOX.run_python("import sys; print(2 * int(sys.stdin.read())); open('x', 'w').write('y')", "21")
    assert (ran.ok, ran.stdout) == (True, "42\n")
    assert BOX.run_python("raise SystemExit(3)").exit_code == 3
    assert BOX.run(["cat", "a.txt"], files={"a.txt": "hello"}).stdout == "hello"
    with pytest.raises(ValueError, match="plain name"):
        BOX.run(["true"], files={"../x": ""})


def test_a_machine_that_forbids_it_is_an_error_and_no_less_isolation(monkeypatch, tmp_path):
    assert why_no_sandbox() == ""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(sandbox, "_bwrap", lambda: Path(broken))
    with pytest.raises(NoSandbox, match="allow user namespaces"):
        BOX.run_python("print(1)")
    assert "No permissions" in why_no_sandbox()
