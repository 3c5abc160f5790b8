"""A lease between its connection and the end of what a host that comes back has to show and to get."""

import asyncio
import time
from pathlib import Path

import pytest

from rl.actors.remote import ProcessDied
from rl.cluster import leases
from rl.cluster.hosts import ClockOff
from rl.cluster.leases import Lease
from rl.errors import ConfigError
from rl.host_protocol import HostRefuses, HostUnreachable, greeting

ADDRESS = "10.0.0.2:7000"


class Writer:
    def close(self):
        pass


class Returning(Lease):
    """Its host answers at once, and takes 0.2 s for the models."""

    def __init__(self, check=lambda: None, patience=5.0):
        shared = Path("/dev/shm/rl-0/x")
        super().__init__(ADDRESS, "run", Path("/tmp/x"), shared, patience, [Path("/model")], check=check)
        self.sent, self.asked = [], []

    async def connect(self):
        self._id, self._was_held, self._writer, self._worker = "lease", True, Writer(), "monarch@x"
        self._sees_directory = False

    def _send(self, models):
        time.sleep(0.2)
        if not self._is_sending:
            raise ConnectionError("it was lost")
        self.sent.append(models)
        return 1

    async def _asked(self, request):
        self.asked.append(request["do"])


@pytest.fixture(autouse=True)
def again_at_once(monkeypatch):
    monkeypatch.setattr(leases, "_AGAIN_SECONDS", 0.01)


async def cancelled(lease, after):
    """By the start of another engine that failed."""
    starting = asyncio.create_task(lease.worker())
    await asyncio.sleep(after)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


def test_a_host_that_greets_and_says_no_more_is_left_without_a_connection(monkeypatch):
    monkeypatch.setattr(leases, "_START_SECONDS", 0.2)
    gone = []

    async def silent(reader, writer):
        writer.write(greeting()[1])
        await reader.readline()
        gone.append(await reader.read() == b"")

    async def main():
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        lease = Lease(address, "run", Path("/tmp/x"), Path("/dev/shm/rl-0/x"), 5.0, [])
        with pytest.raises(HostUnreachable):
            await lease.connect()
        for _ in range(100):
            if gone:
                break
            await asyncio.sleep(0.02)
        assert gone == [True]
        server.close()

    asyncio.run(main())


def test_a_start_that_is_cancelled_while_models_are_sent_leaves_no_host_without_them():
    async def main():
        lease = Returning()
        await cancelled(lease, 0.1)
        assert not lease.is_held
        await asyncio.sleep(0.2)  # the thread that sends sees that it was lost
        assert not lease.sent
        assert await lease.worker() == "monarch@x" and len(lease.sent) == 1

    asyncio.run(main())


def test_a_start_that_is_cancelled_while_the_host_is_looked_at_leaves_none_unchecked():
    def differs():
        time.sleep(0.2)
        raise ConfigError(f"host {ADDRESS} cannot be used: it has 1 GPU, and the plan 8")

    async def main():
        lease = Returning(differs)
        await cancelled(lease, 0.1)
        with pytest.raises(ProcessDied, match="it has 1 GPU, and the plan 8"):
            await lease.worker()

    asyncio.run(main())


def refused(error):
    refusal = ConfigError(str(error))
    refusal.__cause__ = error
    return refusal


@pytest.mark.parametrize(
    "first",
    [
        ClockOff("its clock is 40 s behind this one's"),
        refused(HostRefuses("failed: Too many open files")),
        refused(HostUnreachable("it is gone again")),
    ],
)
def test_a_host_that_has_just_booted_is_asked_again(first):
    errors = [first, first]

    def check():
        if errors:
            raise errors.pop()

    async def main():
        lease = Returning(check)
        assert await lease.worker() == "monarch@x" and not errors
        errors.extend([first] * 10**6)
        impatient = Returning(check, patience=0.1)
        with pytest.raises(ProcessDied, match="clock|open files|gone again"):
            await impatient.worker()

    asyncio.run(main())
