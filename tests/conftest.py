"""Which devices tests use: devices.py. Which run side by side: side_by_side.py. How long each may take."""

import asyncio
import contextlib
import functools
import gc
import importlib
import os
import signal
from typing import Any

import hypothesis
import pytest
import torch
import uvicorn.server

from rl.cluster.environment import prepare_environment
from rl.cluster.machine import num_cores
from rl.processes import freeze_heap
from tests.devices import hide_too_few
from tests.side_by_side import PROCESSES, SideBySide

prepare_environment()  # as `rl` does: processes that tests start wait for work as those of a run do
hide_too_few()
if num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    torch.set_num_threads(max(1, num_cores() // num_workers))
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a shell's background: runs of tests would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and nothing left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")

if num_workers:
    gc.disable()  # until all tests are there

# A client of httpx's, which is httpx2's for openai, reads 140 certificates: 25 ms each, of a thousand clients.
for package in ("httpx", "httpx2"):
    with contextlib.suppress(ModuleNotFoundError):
        transports = importlib.import_module(f"{package}._transports.default")
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)


class _TenTimesAsOften:
    """asyncio for uvicorn, whose servers look ten times a second whether they are to end, and wait as long after it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def sleep(self, seconds: float) -> Any:
        return asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = _TenTimesAsOften()

SECONDS, PROCESSES_SECONDS, SLOW_SECONDS = 120, 300, 900  # of each test, its fixtures included


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> object:
    """See tests/chaos/whole.py."""
    from tests.chaos.whole import whole_run

    return whole_run(tmp_path_factory.mktemp("whole"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SideBySide:
    config.option.loadscopereorder = False  # the group of the tests with processes is among the first
    return SideBySide(config, log)


def pytest_collection_finish() -> None:
    freeze_heap()  # the modules of all tests, a twentieth of the time that they take
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's own limit stands; the others get theirs."""
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        seconds = PROCESSES_SECONDS if item.nodeid.startswith(PROCESSES) else SECONDS
        item.add_marker(pytest.mark.timeout(SLOW_SECONDS if item.get_closest_marker("slow") else seconds))
