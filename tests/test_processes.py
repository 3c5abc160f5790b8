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

import pytest
from fastapi import FastAPI

from configs.quickstart import quickstart
from rl.controller import run
from rl.processes import ProcessInfo, is_gone, is_stopped
from rl.tinker import serve


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


def test_a_frozen_heap_ends_quietly():
    """nanobind, of triton's modules, writes dozens of lines where its objects are there at the end."""
    pytest.importorskip("triton")
    code = "import triton, gc; from rl.processes import freeze_heap; freeze_heap(); print(gc.get_freeze_count() > 1000)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def train(monkeypatch, probe):
    monkeypatch.setattr(run, "run_recipe", lambda *_: probe())
    asyncio.run(run._main("quickstart", quickstart(), Path(), False))


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
