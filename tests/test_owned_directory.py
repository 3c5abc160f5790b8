"""Directories of a run in shared memory and for temporary files: owned by a lock, gone with their owner, and alone."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rl import owned_directory as module
from rl.errors import ConfigError
from rl.owned_directory import is_owned, note_beside, owned_directory, remove_unowned
from tests.integration import runs

HOLD = """
import sys, time
from pathlib import Path
from rl.owned_directory import note_beside, owned_directory
base = Path(sys.argv[1])
with owned_directory(base, "run") as path:
    (path / "weights.bin").write_bytes(b"0")
    note_beside(path, "vllm")
    (base / "vllm").touch()
    print(path, flush=True)
    time.sleep(60)
"""
ROOT = f"rl-{os.getuid()}"


def hold(base):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(base)], stdout=subprocess.PIPE, text=True)
    return process, Path(process.stdout.readline().strip())


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def tree(base):
    """Also while a janitor removes some of it. pathlib's rglob raises then."""
    return {
        str(Path(root, name).relative_to(base))
        for root, directories, files in os.walk(base)
        for name in (*directories, *files)
    }


def wait_for(state):
    deadline = time.monotonic() + 5
    while not state() and time.monotonic() < deadline:
        time.sleep(0.02)
    return state()


def test_it_goes_with_what_it_holds_and_what_is_noted_beside_it(tmp_path):
    others = psutil.Process().children(recursive=True)
    with owned_directory(tmp_path, "run") as path:
        (path / "weights.bin").touch()
        note_beside(path, f"rl-{path.name}-shared")
        (tmp_path / f"rl-{path.name}-shared").touch()
        assert path.parent.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o700
        started = [child for child in psutil.Process().children(recursive=True) if child not in others]
    assert not tree(tmp_path)
    assert started and not any(process.is_running() for process in started)


def strangers(base):
    """Names of every kind that runs have or had, held by nobody; what they are must not matter. Returns the tree."""
    root = base / ROOT
    root.mkdir(mode=0o700)
    for folder in (
        base / "rl-data-cache",
        base / "rl-eval-abc",
        base / "rl-4194305-0123abcd-run",
        base / f"rl-{os.getuid() + 1}" / "4194305-0123abcd",
        root / "no-owner",
        root / "another-program",
        root / "odd-owner" / "owner",
    ):
        folder.mkdir(parents=True)
        (folder / "data").touch()
    (root / "another-program" / "owner").write_text("mine\n")
    (root / "file").touch()
    unowned = base / "elsewhere"
    unowned.mkdir()
    (unowned / "owner").write_text(module._FIRST_LINE + "\n")
    (root / "link").symlink_to(unowned)
    (root / "owner-is-a-link").mkdir()
    (root / "owner-is-a-link" / "owner").symlink_to(unowned / "owner")
    (root / "owner-is-a-pipe").mkdir()
    os.mkfifo(root / "owner-is-a-pipe" / "owner")
    return tree(base)


def test_nothing_of_anybody_else_is_touched(tmp_path):
    before = strangers(tmp_path)
    with owned_directory(tmp_path, "run"):
        assert tree(tmp_path) > before
    assert tree(tmp_path) == before
    process, _ = hold(tmp_path)
    end(process)
    assert wait_for(lambda: tree(tmp_path) == before)  # the janitor's work


def test_every_directory_whose_lock_is_free_is_removed_and_no_other(tmp_path):
    """Of eight that look alike, those that are held stay: a number of a process says nothing."""
    root, locks = tmp_path / ROOT, {}
    root.mkdir(mode=0o700)
    for number in range(8):
        path = root / f"{4194305 + number}-0123abcd"
        path.mkdir()
        (path / "owner").write_text(module._FIRST_LINE + "\n")
        if number % 3 == 0:
            locks[path] = os.open(path / "owner", os.O_RDWR)
            fcntl.flock(locks[path], fcntl.LOCK_EX)
    remove_unowned(tmp_path)
    assert set(root.iterdir()) == set(locks)
    for lock in locks.values():
        os.close(lock)
    remove_unowned(tmp_path)
    assert not tree(tmp_path)


def test_an_empty_directory_that_a_late_process_made_again_goes_with_the_next_run(tmp_path):
    """A process of a killed run may make its directory for temporary files again after the janitor's last look."""
    (tmp_path / ROOT / "4194305-0123abcd").mkdir(parents=True)
    with owned_directory(tmp_path, "run") as path:
        assert set(path.parent.iterdir()) == {path}


def test_a_directory_that_another_run_takes_for_empty_is_made_again(tmp_path, monkeypatch):
    """Between its making and its owner file."""
    own, interrupted = module._own, []

    def own_later(path, what):
        if not interrupted:
            interrupted.append(path)
            remove_unowned(tmp_path)
            assert not path.exists()
        return own(path, what)

    monkeypatch.setattr(module, "_own", own_later)
    with owned_directory(tmp_path, "run") as path:
        assert interrupted and path not in interrupted and path.is_dir()


def test_two_runs_side_by_side(tmp_path):
    process, theirs = hold(tmp_path)
    with owned_directory(tmp_path, "ours") as ours:
        assert (theirs / "weights.bin").exists() and ours.parent == theirs.parent
    assert (theirs / "weights.bin").exists() and (tmp_path / "vllm").exists()
    end(process)
    assert wait_for(lambda: not tree(tmp_path))


def test_the_next_run_removes_what_was_left_where_everything_was_killed(tmp_path):
    process, path = hold(tmp_path)
    for janitor in psutil.Process(process.pid).children():
        janitor.kill()
    end(process)
    time.sleep(0.1)
    assert (path / "weights.bin").exists()
    remove_unowned(tmp_path)
    assert not tree(tmp_path)


def test_a_janitor_leaves_what_has_its_directorys_name_by_then(tmp_path):
    """The next owner may take the name as soon as it is free."""
    process, path = hold(tmp_path)
    (janitor,) = psutil.Process(process.pid).children()
    janitor.suspend()
    end(process)
    remove_unowned(tmp_path)
    assert not path.exists()
    with owned_directory(tmp_path, "the next", path.name) as next_path:
        assert next_path == path and is_owned(path)
        (path / "weights.bin").touch()
        janitor.resume()
        assert wait_for(
            lambda: not psutil.pid_exists(janitor.pid) or janitor.status() == psutil.STATUS_ZOMBIE
        )
        assert (path / "weights.bin").exists()
    assert not tree(tmp_path) and not is_owned(path)


def test_what_was_removed_by_halves_is_removed_by_the_next(tmp_path, monkeypatch):
    """Its owner's file goes last, so that it is known."""
    process, path = hold(tmp_path)
    for janitor in psutil.Process(process.pid).children():
        janitor.kill()
    end(process)
    (path / "more").mkdir()
    (path / "more" / "weights.bin").touch()

    def dies(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            remove_unowned(tmp_path)
    assert not path.exists() and tree(tmp_path)
    remove_unowned(tmp_path)
    assert not tree(tmp_path)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "file", "another user's"])
def test_a_root_that_is_not_ours_is_refused_and_stays(kind, tmp_path, monkeypatch):
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    base.mkdir()
    (elsewhere / "4194305-0123abcd").mkdir(parents=True)
    (elsewhere / "4194305-0123abcd" / "owner").write_text(module._FIRST_LINE + "\n")
    if kind == "link":
        (base / ROOT).symlink_to(elsewhere)
    elif kind == "link to nothing":
        (base / ROOT).symlink_to(tmp_path / "nothing")
    elif kind == "file":
        (base / ROOT).touch()
    else:
        (base / ROOT).mkdir(mode=0o700)
        monkeypatch.setattr(module.os, "getuid", lambda uid=os.getuid(): uid + 1)
        (base / ROOT).rename(base / f"rl-{os.getuid()}")
    before = tree(tmp_path)
    with (
        pytest.raises(ConfigError, match="no directory of this user .*; remove it"),
        owned_directory(base, "run"),
    ):
        pass
    assert tree(tmp_path) == before


def test_a_run_name_of_any_characters(tmp_path):
    for name in ("[a]*" + "x" * 250, "\N{GRINNING FACE}" * 63, "../../up", "\udcff"):
        with owned_directory(tmp_path, name) as path:
            (path / "weights.bin").touch()
        assert not tree(tmp_path)


def test_a_base_that_cannot_be_used_is_refused_in_a_sentence(tmp_path, monkeypatch):
    with (
        pytest.raises(ConfigError, match="there is no directory .*; mount a tmpfs there"),
        owned_directory(tmp_path / "no", ""),
    ):
        pass

    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(ConfigError, match="has no locks .*set TMPDIR to another"),
        owned_directory(tmp_path, ""),
    ):
        pass
    assert not [path for path in tmp_path.rglob("*") if path.name != ROOT]


TEMPORARY = """
import os, tempfile
from rl.owned_directory import temporary_directory, temporary_files
with temporary_files():
    print(os.environ["TMPDIR"], temporary_directory(), len(os.environ["TMPDIR"] + "/" + "u" * 36), tempfile.gettempdir())
assert os.environ["TMPDIR"] == tempfile.gettempdir()
"""


@pytest.mark.parametrize("length", [1, 60])
def test_temporary_files_go_with_the_process_and_sockets_have_room(length, tmp_path):
    base = tmp_path / ("t" * length)
    base.mkdir()
    (base / "user's").touch()
    ended = subprocess.run(
        [sys.executable, "-c", TEMPORARY],
        env=os.environ | {"TMPDIR": str(base)},
        capture_output=True,
        text=True,
        check=True,
    )
    inside, same, longest, own = ended.stdout.split()
    assert inside == same and int(longest) <= 107 and own == str(base)
    assert not Path(inside).exists() and tree(base) == {"user's"}


FORKED = """
import os, signal, sys
from pathlib import Path
from rl.owned_directory import owned_directory, temporary_directory
kind, base = sys.argv[1], Path(sys.argv[2])
with owned_directory(base, "run") as path:
    if kind == "ends with the process":
        path = temporary_directory()
    child = os.fork()
    if not child and kind == "lives on":
        signal.pause()
    if not child:
        sys.exit(0)
    if kind != "lives on":
        os.waitpid(child, 0)
        assert path.exists(), "a fork removed it"
"""


@pytest.mark.parametrize("kind", ["lives on", "leaves the block", "ends with the process"])
def test_the_directory_is_its_makers_whatever_a_fork_of_it_does(kind, tmp_path):
    """A fork that lives on holds nothing up; one that ends removes nothing."""
    command = [sys.executable, "-c", FORKED, kind, str(tmp_path)]
    with subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, start_new_session=True
    ) as maker:
        try:
            assert maker.wait(timeout=10) == 0
            assert not tree(tmp_path)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(maker.pid, signal.SIGKILL)


def test_a_root_that_another_run_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    root = tmp_path / ROOT
    root.mkdir()
    listed = Path.iterdir

    def iterdir(path):
        if path == root:
            root.rmdir()
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with owned_directory(tmp_path, "run") as path:
        assert path.is_dir()


def test_the_tests_of_whole_runs_see_what_a_run_has_and_what_a_dead_one_leaves(tmp_path, monkeypatch):
    """They look by name: under another name they would see nothing, and pass."""
    monkeypatch.setattr(runs, "SHARED_MEMORY", tmp_path)
    with owned_directory(tmp_path, "run") as path:
        (path / "model-v3-rank0.bin").touch()
        (path / "model-v3-rank1.bin").touch()
        versions = runs.SharedVersions(os.getpid())
        assert wait_for(lambda: versions.seen)
        versions.stop()
        assert versions.seen == {"model-v3"} and versions.most == 1
        assert path.name not in runs.shared_leftovers()
        monkeypatch.setattr(runs.psutil, "pid_exists", lambda pid: False)
        assert path.name in runs.shared_leftovers()
    assert path.name not in runs.shared_leftovers()
