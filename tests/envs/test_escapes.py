"""Ways out of the sandbox, each with a control: the same program outside it, where it succeeds."""

import contextlib
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rl.envs import seccomp
from rl.envs.sandbox import Sandbox
from rl.envs.seccomp import FIRST_SHARED, REFUSED, SHARED_ALLOWED, seccomp_filter

BOX = Sandbox(seconds=20.0, memory_mib=64, max_processes=8)
MIB = 2**20

SYSCALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def syscall(x86, arm, *arguments):
    number = x86 if platform.machine() == "x86_64" else arm
    return libc.syscall(*(ctypes.c_long(a) for a in (number, *arguments)))
"""
ESCAPES = {
    "a file through another process's root": "print('GOT OUT', open('/proc/{pid}/root{secret}').read())",
    "a key in a process's environment": """
import contextlib, os
for pid in filter(str.isdigit, os.listdir('/proc')):
    with contextlib.suppress(OSError):
        if 'k3y' in open(f'/proc/{{pid}}/environ', errors='replace').read():
            print('GOT OUT')
""",
    "a file that its parent has open": """
import os
for fd in range(3, 256):
    try:
        if b's3cret' in os.pread(fd, 100, 0):
            print('GOT OUT')
    except OSError:
        pass
""",
    "a process of the host": "import os; os.kill({victim}, 9); print('GOT OUT')",
    "a server at a file": "import socket; socket.socket(socket.AF_UNIX).connect({path!r}); print('GOT OUT')",
    "a server at an abstract name": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}'); print('GOT OUT')",
    "the machine's hypervisor": "import socket; socket.socket(40, socket.SOCK_STREAM); print('GOT OUT')",
    "the kernel's cipher sockets": "import socket; socket.socket(38, socket.SOCK_SEQPACKET); print('GOT OUT')",
    "the kernel's network tables": "import socket; socket.socket(16, socket.SOCK_RAW); print('GOT OUT')",
    "a user namespace, by unshare": SYSCALL + "if syscall(272, 97, 0x10000000) == 0: print('GOT OUT')",
    "a user namespace, by clone": SYSCALL + """
pid = syscall(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: print('GOT OUT')
""",
    "memory in sockets": """
import socket
pairs = [socket.socketpair() for _ in range(200)]
print('GOT OUT')
""",
    "memory in files without a name": """
import os
for n in range(3):
    with open(os.memfd_create('x'), 'wb', closefd=False) as file:
        for _ in range(32): file.write(bytes(2**20))
print('GOT OUT')
""",
    "memory that is shared": SYSCALL + """
if all(syscall(29, 194, 0, 48 << 20, 0o1600) >= 0 for _ in range(2)): print('GOT OUT')
""",
    "files in any directory": """
import os
written = 0
for place in {places!r}:
    for number in range(2):
        try:
            with open(os.path.join(place, place.strip('/.') .replace('/', '-') + str(number)), 'wb') as file:
                for _ in range(40):
                    file.write(bytes(2**20))
                    file.flush()
                    written += 1
        except OSError:
            pass
if written > 64: print('GOT OUT')
""",
    "settings of the kernel": """
for name in ('sys/kernel/core_pattern', 'self/oom_score_adj'):  # outside, root may write both
    try:
        open(f'/proc/{{name}}', 'r+').close()
        print('GOT OUT')
    except OSError:
        pass
""",
    "stopping what watches it": """
import os, signal, time
parent = os.getppid()
os.kill(parent, signal.SIGSTOP)
time.sleep(0.2)
if open(f'/proc/{{parent}}/stat').read().split()[2] == 'T': print('GOT OUT')
os.kill(parent, signal.SIGCONT)
""",
    "the memory of what watches it": """
import os
parent = os.getppid()
place = int(open(f'/proc/{{parent}}/maps').readline().split('-')[0], 16)
memory = open(f'/proc/{{parent}}/mem', 'r+b', buffering=0)
memory.seek(place)
if memory.read(4): print('GOT OUT')
""",
}  # fmt: skip
OUTSIDE = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(-1 & 2**64 - 1), 0, 0, 0)  # its child may look at it
subprocess.run([sys.executable, "-c", sys.argv[1]], close_fds=False)
"""
"""Stands where the sandbox's watcher stands: the parent of the program."""
OF_SOME_KERNELS = ("the machine's hypervisor", "the kernel's cipher sockets")
"""Outside they fail where the kernel lacks them. Of these `test_sockets_are_of_three_families` is the control."""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """What there is outside, for the programs to be formatted with."""
    monkeypatch.setenv("SECRET_KEY", "k3y")
    secret, name = tmp_path / "secret", f"rl-test-{os.getpid()}"
    secret.write_text("s3cret")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(
            tempfile.TemporaryDirectory()
        )  # a short path: a socket's has 108 bytes
        for address in (f"{directory}/socket", f"\0{name}"):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        opened = stack.enter_context(secret.open())
        os.set_inheritable(opened.fileno(), True)
        victim = stack.enter_context(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        stack.callback(victim.kill)
        yield {
            "secret": str(secret),
            "pid": os.getpid(),
            "victim": victim.pid,
            "path": f"{directory}/socket",
            "name": name,
            "places": [".", "/", "/dev", "/dev/shm", "/run", "/home", "/tmp", "/etc", "/var/tmp"],
        }


@pytest.mark.parametrize("name", ESCAPES)
def test_no_escape_from_the_sandbox(name, world):
    ran = BOX.run_python(ESCAPES[name].format(**world))
    assert "GOT OUT" not in ran.stdout and not ran.cause


@pytest.mark.parametrize("name", [name for name in ESCAPES if name not in OF_SOME_KERNELS])
def test_outside_it_succeeds(name, world, tmp_path):
    code = ESCAPES[name].format(**{**world, "places": ["."]})
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, code], capture_output=True, text=True, cwd=tmp_path, close_fds=False
    )
    assert "GOT OUT" in done.stdout, done.stderr


STAYS = "import os, sys, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}])\n"


def test_no_process_outlives_the_sandbox_but_outside_one_does(tmp_path):
    def marked(mark):
        return [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]

    inside, outside = (f"rl-test-{where}-{os.getpid()}" for where in ("inside", "outside"))
    assert BOX.run_python(STAYS.format(mark=inside)).ok
    subprocess.run([sys.executable, "-c", STAYS.format(mark=outside)], check=True)
    deadline = time.monotonic() + 30
    while not (left := marked(outside)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in left:
        process.kill()
    assert left and not marked(inside)


REMEMBERS = """
import os, pathlib
for place in ('.', '/tmp', os.environ.get('HOME', '.')):
    if pathlib.Path(place, '{name}').exists(): print('GOT OUT')
for place in ('.',):
    pathlib.Path(place, '{name}').write_text('x')
"""


def test_no_run_sees_the_files_of_another_but_outside_it_does(tmp_path):
    code = REMEMBERS.format(name=f"rl-test-{os.getpid()}")
    assert "GOT OUT" not in "".join(BOX.run_python(code).stdout for _ in range(2))
    outside = [
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert "GOT OUT" in outside[1].stdout


CALLS = SYSCALL + """
for name, *numbers in {calls!r}:
    ctypes.set_errno(0)
    if syscall(*numbers, -1, -1, -1, -1, -1, -1) != -1 or ctypes.get_errno() != {errno}: print(name)
"""  # fmt: skip


def test_every_refused_call_is_refused():
    calls = [(name, *numbers) for name, numbers in REFUSED.items() if None not in numbers]
    assert BOX.run_python(CALLS.format(calls=calls, errno=1)).stdout == ""
    new = [(n, n, n) for n in range(FIRST_SHARED, 600) if n not in SHARED_ALLOWED.values()]
    assert BOX.run_python(CALLS.format(calls=new, errno=38)).stdout == ""


def filtered(number: int, argument: int) -> int:
    """What the filter answers to a call of this machine's, by its instructions (linux/bpf_common.h)."""
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()]
    data = struct.pack("<IIQQ", number, arch, 0, argument)
    program, at, value = seccomp_filter(), 0, 0
    while True:
        code, if_true, if_false, k = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        match code:
            case 0x20:  # BPF_LD | BPF_W | BPF_ABS
                (value,) = struct.unpack_from("<I", data, k)
            case 0x06:  # BPF_RET | BPF_K
                return k
            case _:  # BPF_JMP with BPF_JEQ, BPF_JGE, BPF_JSET
                tests = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}
                at += if_true if tests[code] else if_false


def test_sockets_are_of_three_families():
    """Of any other the answer is EAFNOSUPPORT, whether or not this kernel has it."""
    call = {"x86_64": 41, "aarch64": 198}[platform.machine()]
    answers = {family: filtered(call, family) for family in range(64)}
    assert {family for family, answer in answers.items() if answer == 0x7FFF0000} == {1, 2, 10}
    assert {answer for family, answer in answers.items() if family not in (1, 2, 10)} == {0x50000 | 97}
    assert filtered(call + 1, 40) == 0x7FFF0000  # another call


def test_a_machine_whose_calls_are_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "vax")
    with pytest.raises(ValueError, match="vax"):
        seccomp_filter()


@pytest.mark.parametrize(
    "code",
    [
        "import multiprocessing as m, threading; m.Lock(); threading.Thread(target=print, args=('fine',)).start()",
        "import subprocess; print(subprocess.run(['echo', 'fine'], capture_output=True, text=True).stdout)",
        "from multiprocessing import Pool\nwith Pool(1) as pool: print(pool.map(str, ['fine'])[0])",
        "import tempfile; f = tempfile.NamedTemporaryFile(); print('fine')",
        "import asyncio; asyncio.run(asyncio.sleep(0)); print('fine')",
        "import os, random; os.urandom(9); print('fine', file=open('/dev/stdout', 'w'))",
        "print('x', file=open('/dev/null', 'w')); print('fine', len(open('/dev/zero', 'rb').read(9)))",
    ],
)
def test_ordinary_programs_work(code):
    ran = BOX.run_python(code) if "Pool" not in code else replace(BOX, memory_mib=512).run_python(code)
    assert ran.ok and ran.stdout.startswith("fine"), ran.stderr


def test_nothing_of_the_system_can_be_written():
    code = """
import os
for top in ('/usr', '/proc', '/dev', '/'):
    for place, directories, files in os.walk(top):
        if top == '/':
            directories[:] = [d for d in directories if d not in ('usr', 'proc', 'dev')]
        directories[:] = [d for d in directories if os.path.join(place, d) != os.getcwd()]
        if os.access(place, os.W_OK):
            print(place)
        for file in files if top == '/proc' else ():
            try:
                os.close(os.open(os.path.join(place, file), os.O_WRONLY | os.O_NONBLOCK))
                if not place.endswith('/fd'): print(place, file)
            except OSError: pass
"""
    ran = replace(BOX, seconds=60.0).run_python(code)
    assert ran.ok and ran.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ending_what_watches_it_is_a_failure_of_the_code(number):
    ran = BOX.run_python(f"import os, time; os.kill(1, {int(number)}); os.kill(os.getppid(), {int(number)}); time.sleep(0.3); raise SystemExit(7)")  # fmt: skip
    assert not ran.ok


def test_the_interpreter_is_where_the_sandbox_looks():
    assert Path(sys.base_prefix, "bin", "python3").exists()
