"""Code that a model wrote: each attack is refused or contained. Each would succeed outside (the control)."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl.envs import sandbox
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import EpisodeRunner
from rl.envs.chat.tools import Tool
from rl.envs.no_sandbox import why_not
from rl.envs.sandbox import NoSandbox, Ran, Sandbox, why_no_sandbox
from rl.types import Problem

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
    box, files = Sandbox(seconds=20.0, max_processes=16), {"fork_bomb.py": code}
    ran = box.run([os.path.realpath(sys.executable), "-I", "fork_bomb.py"], files=files)
    assert time.monotonic() - began < 20
    assert ran.cause == "processes" and not ran.ok
    time.sleep(0.5)
    assert not [p for p in psutil.process_iter(["cmdline"]) if "fork_bomb.py" in (p.info["cmdline"] or [])]


def test_time_and_output_are_limited():
    ran = Sandbox(seconds=0.7).run_python("while True: pass")
    assert (ran.cause, ran.ok) == ("time", False)
    ran = Sandbox(seconds=5, max_output=1000).run_python("while True: print('x' * 100)")
    assert ran.cause == "output" and len(ran.stdout) == 1000


@pytest.mark.parametrize("code", [119, 137, 200, 255])
def test_a_programs_own_exit_code_is_no_signal_and_no_cause(code):
    ran = BOX.run_python(f"import sys; sys.exit({code})")
    assert (ran.exit_code, ran.cause, ran.ok) == (code, "", False)


def test_the_signal_that_ended_a_program_is_told():
    assert BOX.run_python("import os; os.kill(os.getpid(), 11)").exit_code == -11


def test_what_it_is_for_works():
    ran = BOX.run_python("import sys, helper; print(helper.double(int(sys.stdin.read())))", "21", {"helper.py": "double = lambda x: 2 * x"})  # fmt: skip
    assert (ran.ok, ran.stdout) == (True, "42\n")
    ran = BOX.run_python("import sys; print(2 * int(sys.stdin.read())); open('x', 'w').write('y')", "21")
    assert (ran.ok, ran.stdout) == (True, "42\n")
    assert BOX.run_python("raise SystemExit(3)").exit_code == 3
    assert BOX.run(["cat", "a.txt"], files={"a.txt": "hello"}).stdout == "hello"
    with pytest.raises(ValueError, match="plain name"):
        BOX.run(["true"], files={"../x": ""})


@pytest.mark.parametrize(
    "said", ["bwrap: x", "bwrap: No permissions to create new namespace", '{ "exit-code": 0 }']
)
def test_what_code_says_is_its_own_failure_and_not_the_machines(said):
    ran = BOX.run_python(f"import sys; print({said!r}, file=sys.stderr); raise SystemExit(1)")
    assert (ran.exit_code, ran.stderr, ran.cause) == (1, said + "\n", "")


POLICY_WORDS = {
    "a lone surrogate": "print('\ud800')",
    "a null character": "print('a\0b')",
    "no program": "?!",
    "nothing": "",
    "a long line": "x = '" + 300_000 * "y" + "'; raise SystemExit(1)",
}


@pytest.mark.parametrize("name", POLICY_WORDS)
@pytest.mark.parametrize("place", ["code", "stdin", "a file", "an argument"])
def test_whatever_the_policy_writes_is_run_or_fails_and_raises_nothing(name, place):
    """What raises in a reward drops the sample: the policy must not be able to."""
    words = POLICY_WORDS[name]
    echo = ["cat", "a.txt"]
    ran = {
        "code": lambda: BOX.run_python(words),
        "stdin": lambda: BOX.run(["cat"], stdin=words),
        "a file": lambda: BOX.run(echo, files={"a.txt": words}),
        "an argument": lambda: BOX.run(["sh", "-c", words]),
    }[place]()
    assert isinstance(ran, Ran) and (ran.ok or ran.exit_code)


def test_files_that_take_more_than_the_memory_are_the_codes_failure():
    ran = Sandbox(memory_mib=1).run(["true"], files={"a": "x" * 2**20, "b": "x" * 2**19})
    assert not ran.ok and "memory_mib" in ran.stderr


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


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({}, "in a container: docker run --security-opt seccomp=unconfined"),
        ({"kernel/unprivileged_userns_clone": "1", "user/max_user_namespaces": "63000"}, "in a container: "),
        ({"kernel/unprivileged_userns_clone": "0"}, "sysctl kernel.unprivileged_userns_clone=1"),
        (
            {"kernel/apparmor_restrict_unprivileged_userns": "1", "user/max_user_namespaces": "0"},
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, sysctl user.max_user_namespaces=15000",
        ),
    ],
)
def test_the_remedy_is_that_of_the_setting_that_forbids_it(values, remedy, tmp_path):
    for name, value in values.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value + "\n")
    assert remedy in why_not("bwrap: setting up uid map: Permission denied", tmp_path)


def test_a_python_that_the_sandbox_would_hide_is_named(monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", "/tmp/python3.12")
    assert "Python lies in /tmp/python3.12" in why_no_sandbox()


def test_a_sandbox_that_does_not_start_in_a_tool_drops_the_sample():
    """The policy is told of its own mistakes only."""

    def compute(arguments, episode):
        raise NoSandbox("this machine does not isolate code")

    tool = Tool({"type": "function", "function": {"name": "compute", "parameters": {}}}, compute)
    runner = EpisodeRunner(ChatEnv(), [tool], Problem("1", "?"), 0)
    call = {"id": "0", "type": "function", "function": {"name": "compute", "arguments": "{}"}}
    with pytest.raises(NoSandbox):
        runner.step({"role": "assistant", "content": "", "tool_calls": [call]}, (), ())


def test_the_systems_programs_are_there_also_where_they_are_links():
    """As Debian's awk, which is one of several by /etc/alternatives."""
    if shutil.which("awk") is None:
        pytest.skip("this machine has no awk")
    ran = BOX.run(["sh", "-c", "echo a b | awk '{print $2}'"])
    assert (ran.ok, ran.stdout) == (True, "b\n"), ran


def test_python_is_the_one_of_the_virtual_environment():
    version = BOX.run_python("import sys; print(*sys.version_info[:3])").stdout.split()
    assert version == [str(part) for part in sys.version_info[:3]]
