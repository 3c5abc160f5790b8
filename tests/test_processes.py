"""What the operating system says of processes."""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fastapi import FastAPI

from configs.quickstart import quickstart
from rl.controller import run
from rl.errors import TERMINATED
from rl.host_protocol import own_host
from rl.processes import LEASE, ProcessInfo, Reaper, is_gone, is_stopped, process_info, reap_orphans
from rl.tinker import serve
from tests.virtual_time import run_virtually

PROTECTED = """
import os, signal, subprocess, threading
from rl.processes import INTERRUPTS, outlive_interrupts
thread = threading.Thread(target=outlive_interrupts)
thread.start()
thread.join()
for number in INTERRUPTS:
    os.kill(os.getpid(), number)
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(number)
    assert child.wait(10) == -number, number
print("alive")
"""


def test_a_process_outlives_what_asks_a_run_to_end_and_what_it_starts_does_not():
    done = subprocess.run([sys.executable, "-c", PROTECTED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", done.stderr


def test_a_process_that_stands_still_is_told_from_one_that_runs_waits_or_is_gone():
    child = subprocess.Popen(["sleep", "60"])
    info = ProcessInfo(child.pid, socket.gethostname(), "cpu")
    try:
        assert not is_stopped(info)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.05)
        assert is_stopped(info) and not is_stopped(ProcessInfo(child.pid, "another host", "cpu"))
        os.kill(child.pid, signal.SIGCONT)
        time.sleep(0.05)
        assert not is_stopped(info) and not is_gone(info)
    finally:
        child.kill()
    time.sleep(0.2)
    assert is_gone(info)  # though nobody has waited for it
    child.wait()
    assert is_gone(info) and not is_stopped(info)
    assert not is_gone(ProcessInfo(child.pid, "another host", "cpu"))


ADOPTS = """
import asyncio, itertools, os, subprocess, sys, time
import psutil
from rl.processes import Reaper, adopt_orphans

adopt_orphans()
reaper, number = Reaper(), itertools.count(10)
PARENT = "import subprocess, sys; kept = [subprocess.Popen(['sleep', sys.argv[1]], start_new_session=own) for own in (False, True)]; "

def fork(own_session):
    if pid := os.fork():
        return pid
    if own_session:
        os.setsid()
    os._exit(7)

def has_ended(child):
    try:
        return child.status() == "zombie"
    except psutil.NoSuchProcess:  # a thread of asyncio's reaped it since it was listed
        return True

async def main():
    # Orphans whose parents are in a session of their own, or in ours, and end before or after they do.
    for own_session, seconds, after in ((True, 0.3, ""), (True, 0.0, "import time; time.sleep(0.5)"), (False, 0.3, "")):
        parent = subprocess.Popen([sys.executable, "-c", PARENT + (after or "input()"), str(seconds)],
                                  start_new_session=own_session, stdin=subprocess.PIPE)
        while len(psutil.Process(parent.pid).children()) < 2:
            time.sleep(0.01)
        reaper.reap()
        parent.stdin.write(b"\\n")
        parent.stdin.close()
        parent.wait()
    # One that nobody saw alive, of a marked process.
    code = "from rl.processes import mark_descendants; mark_descendants(); " + PARENT + "pass"
    subprocess.run([sys.executable, "-c", code, "0.01"], start_new_session=True, check=True)
    time.sleep(0.3)
    exits = [sys.executable, "-c", "raise SystemExit(7)"]
    popen = [subprocess.Popen(exits, start_new_session=own) for own in (False, True)]
    forked = [fork(own) for own in (False, True)]
    awaited = [await asyncio.create_subprocess_exec(*exits, start_new_session=own) for own in (False, True)]
    own = {*forked, *(process.pid for process in [*popen, *awaited])}
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        reaper.reap()  # while children run, as they end, and when all are zombies
        children = psutil.Process().children()
        if {child.pid for child in children} <= own and all(map(has_ended, children)):
            break
        time.sleep(0.01)
    reaper.reap()
    print([child for child in psutil.Process().children() if child.pid not in own])
    print([p.wait() for p in popen], [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in forked])
    print([await p.wait() for p in awaited])

asyncio.run(main())
"""


def test_a_lower_limit_than_the_mark_is_left_as_it_is():
    code = (
        "import resource; from rl.processes import mark_descendants; limit = (10**6, 10**6); "
        "resource.setrlimit(resource.RLIMIT_RTTIME, limit); mark_descendants(); "
        "assert resource.getrlimit(resource.RLIMIT_RTTIME) == limit"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_adopted_zombies_are_reaped_and_no_status_is_stolen():
    ended = subprocess.run([sys.executable, "-c", ADOPTS], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split("\n")[:3] == ["[]", "[7, 7] [7, 7]", "[7, 7]"], ended.stderr


def test_a_run_that_a_marked_process_started_steals_no_status():
    """All of its children have the mark, as it has."""
    code = (
        "import subprocess, sys, time; from rl.processes import Reaper, mark_descendants; mark_descendants();"
        "child = subprocess.Popen([sys.executable, '-c', 'raise SystemExit(7)'], start_new_session=True);"
        "reaper = Reaper(); reaper.reap(); time.sleep(0.5); reaper.reap(); print(child.wait())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "7\n", ended.stderr


def test_a_frozen_heap_ends_quietly():
    """nanobind, of triton's modules, writes dozens of lines where its objects are there at the end."""
    pytest.importorskip("triton")
    code = "import triton, gc; from rl.processes import freeze_heap; freeze_heap(); print(gc.get_freeze_count() > 1000)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def train(monkeypatch, probe):
    monkeypatch.setattr(run, "run_recipe", lambda *_: probe())
    asyncio.run(run._main("quickstart", quickstart(), Path(), False, False, ()))


def start_server(monkeypatch, probe):
    asyncio.run(serve._interruptible(probe()))


def listen(monkeypatch, probe):
    monkeypatch.setattr(serve.Server, "serve", lambda *_, **__: probe())
    asyncio.run(serve._listen(FastAPI(), None))


@pytest.mark.parametrize("command", [train, start_server, listen])
@pytest.mark.parametrize("ignored", [c for n in range(4) for c in itertools.combinations(SIGNALS, n)])
def test_what_was_ignored_at_the_start_stays_so_and_the_rest_is_handled(ignored, command, monkeypatch):
    """As `nohup` starts a process, or a shell without job control by `&`."""

    async def probe():
        during.extend(number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN)
        handled.extend(
            number for number in SIGNALS if asyncio.get_running_loop().remove_signal_handler(number)
        )

    before, during, handled = {number: signal.getsignal(number) for number in SIGNALS}, [], []
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        command(monkeypatch, probe)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert tuple(during) == ignored
    assert {*handled} == {*SIGNALS} - {*ignored}


@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="a process namespace needs root",
)
def test_a_containers_first_process_ends_when_it_is_told_to_from_its_start_on():
    """The kernel spares it a signal that it does not handle."""
    waits = "cli._dispatch = lambda words: print('there', flush=True) or time.sleep(60) or 0"
    script = f"import sys, time; from rl import cli; {waits}; sys.argv = ['rl', 'doctor']; cli.main()"
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as outside:
        assert outside.stdout.readline() == "there\n"
        (first,) = psutil.Process(outside.pid).children()
        first.terminate()
        assert outside.wait(20) == TERMINATED and "rl: interrupted" in outside.stderr.read()


def test_a_process_says_by_which_lease_it_is_where_it_is(monkeypatch):
    """By another lease it would be taken for gone."""
    monkeypatch.delenv(LEASE, raising=False)
    assert process_info() == ProcessInfo(os.getpid(), own_host(), "cpu", "")
    monkeypatch.setenv(LEASE, "a lease")
    assert process_info("cuda:3") == ProcessInfo(os.getpid(), own_host(), "cuda:3", "a lease")


def test_orphans_are_looked_for_as_long_as_a_run_goes_on_and_not_all_the_time(monkeypatch):
    looks = []
    monkeypatch.setattr(Reaper, "reap", lambda self: looks.append(1))

    async def main():
        reaping = asyncio.create_task(reap_orphans())
        await asyncio.sleep(61)
        reaping.cancel()

    run_virtually(main())
    assert 2 <= len(looks) <= 31
