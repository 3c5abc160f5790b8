"""Births: real processes that die before they have answered anything."""

import asyncio
import os
import subprocess
import sys

import pytest

from rl.actors import births as module
from rl.actors import out_of_memory
from rl.actors.births import Births
from rl.actors.remote import ProcessDied
from rl.processes import process_info


@pytest.fixture
def births(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    return Births("generator-0")


def spawn(environment, code="import time; time.sleep(60)"):
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environment})


async def answer(seconds=60.0):
    await asyncio.sleep(seconds)
    return "here"


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_a_death_ends_the_wait_for_the_first_answer(births, seconds):
    async def main():
        environment = births.expect(2)
        processes = [spawn(environment) for _ in range(2)]
        starting = asyncio.create_task(births.watching(answer()))
        try:
            while len(births._born) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(seconds)
            processes[1].kill()
            with pytest.raises(ProcessDied, match=rf"generator-0 died in start \(pid {processes[1].pid} on"):
                await asyncio.wait_for(starting, 20)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_children_of_the_processes_may_end_and_another_spawn_is_another_mesh(births):
    async def main():
        first = spawn(births.expect(1))
        while not births._born:
            births._one_that_is_gone()
            await asyncio.sleep(0.01)
        code = "import subprocess; subprocess.run(['true']); print(flush=True); import time; time.sleep(60)"
        second = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, **births.expect(1)}, stdout=subprocess.PIPE
        )
        try:
            first.kill()
            first.wait()
            assert second.stdout.readline() == b"\n"  # its own child has ended
            assert await births.watching(answer(0.2)) == "here"
        finally:
            second.kill()
            second.wait()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_kill_for_memory_before_the_birth_is_not_blamed(births, monkeypatch):
    killed = 0
    monkeypatch.setattr(out_of_memory, "num_killed", lambda: killed)
    births.expect(1)  # the first life, in which the kernel kills another program
    killed = 1

    async def main():
        process = spawn(births.expect(1), "import nonsense")
        process.wait()
        births._born = [process_info()]
        monkeypatch.setattr(module, "is_gone", lambda process: True)
        await births.watching(answer())

    with pytest.raises(ProcessDied) as death:
        asyncio.run(main())
    assert "memory" not in str(death.value)
