"""A thread that writes: order, bounds, deadlines, and whatever a job raises."""

import asyncio
import gc
import random
import threading
from concurrent.futures import Future
from contextlib import suppress

import pytest

from rl.errors import RunError
from rl.observability.writer import Late, Writer, _wait

RAISED = [OSError("x"), ValueError("x"), MemoryError("x"), TimeoutError("x"), StopIteration("x")]
EXITS = [SystemExit("x"), KeyboardInterrupt("x"), GeneratorExit("x"), asyncio.CancelledError("x")]


def failing(error):
    def job():
        raise error

    return job


def nothing():
    pass


def test_jobs_run_in_their_order_in_one_other_thread():
    seen = []

    async def main():
        writer = Writer("it", 10)
        for i in range(50):
            writer.put(lambda i=i: seen.append((i, threading.get_ident())), 0)
        assert await writer.run(lambda: len(seen), 20) == 50
        assert await writer.close(lambda: seen.append((50, threading.get_ident())), 20) == 0
        with pytest.raises(RunError, match="it is closed"):
            writer.put(nothing)
        assert not writer.offer(nothing, 1)

    asyncio.run(main())
    assert [i for i, _ in seen] == list(range(51))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1


@pytest.mark.parametrize("seed", range(20))
def test_what_is_taken_is_done_once_and_in_order_whatever_comes(seed):
    """Any mixture of calls, jobs that raise, and moments at which the thread stands still."""
    rng = random.Random(seed)
    taken, done, num_errors = [], [], 0

    async def main():
        nonlocal num_errors
        writer, gate = Writer("it", 5), threading.Event()
        gate.set()
        for i in range(200):
            fails = rng.random() < 0.1

            def job(i=i, fails=fails):
                gate.wait()
                done.append(i)
                if fails:
                    raise OSError(i)

            size = rng.randrange(4)
            try:
                match rng.choice(("put", "offer", "run", "stop", "go")):
                    case "put":
                        taken.append((i, fails))  # also where it raises an earlier job's error
                        writer.put(job, size)
                    case "offer" if writer.offer(job, size):
                        taken.append((i, fails))
                    case "run" if gate.is_set():
                        taken.append((i, fails))
                        await writer.run(job, 20)
                    case "stop":
                        gate.clear()
                    case "go":
                        gate.set()
            except OSError:
                num_errors += 1
            except RunError as error:
                assert "does not keep up" in str(error)
                taken.pop()
        gate.set()
        with suppress(OSError):
            assert await writer.close(nothing, 20) == 0

    asyncio.run(main())
    assert done == [i for i, _ in taken]
    assert num_errors <= sum(fails for _, fails in taken)


@pytest.mark.parametrize("error", [*RAISED, *EXITS], ids=lambda error: type(error).__name__)
def test_what_a_job_raises_is_raised_once_and_the_thread_goes_on(error):
    expected = type(error) if isinstance(error, Exception) else RunError

    async def main():
        writer, done = Writer("it", 10), []
        writer.put(failing(error))
        writer.put(lambda: done.append(1))
        with pytest.raises(expected if expected is not StopIteration else RuntimeError):
            await writer.run(nothing, 20)
        assert done == [1]
        writer.put(nothing)  # it was said
        with pytest.raises(expected if expected is not StopIteration else RuntimeError):
            await writer.run(failing(error), 20)
        assert await writer.run(lambda: 3, 20) == 3
        writer.put(failing(error))
        with pytest.raises(expected if expected is not StopIteration else RuntimeError):
            await writer.close(nothing, 20)

    asyncio.run(main())


def test_what_is_put_is_done_also_where_an_earlier_jobs_error_is_raised():
    """A disk that failed once and is well again: the line of the next step is in the file."""

    async def main():
        writer, done = Writer("it", 10), []
        writer.put(failing(OSError("x")))
        while writer._jobs:
            await asyncio.sleep(0)
        with pytest.raises(OSError, match="x"):
            writer.put(lambda: done.append(1))
        await writer.run(nothing, 20)
        assert done == [1]

    asyncio.run(main())


def test_what_waits_is_bounded():
    """`offer` up to the bound, `put` up to twice of it; and more again once the thread gets on."""

    async def main():
        writer, gate = Writer("it", 10), threading.Event()
        assert writer.offer(gate.wait, 99)  # alone, whatever its size
        assert not writer.offer(nothing, 1)
        gate.set()
        await writer.run(nothing, 20)
        while writer._jobs:  # its answer is there a moment before its thread puts it away
            await asyncio.sleep(0)
        gate.clear()
        writer.put(gate.wait, 4)
        assert writer.offer(nothing, 6) and not writer.offer(nothing, 1)
        writer.put(nothing, 10)
        with pytest.raises(RunError, match="it does not keep up: 3 writes wait for it"):
            writer.put(nothing, 1)
        writer.put(nothing)  # without a size
        gate.set()
        await writer.run(nothing, 20)
        assert writer.offer(nothing, 10)

    asyncio.run(main())


def test_a_job_that_hangs_ends_no_wait_late_and_is_lost_at_the_end(monkeypatch):
    gate, begun, raised = threading.Event(), [], []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    async def main():
        writer = Writer("one that hangs", 10)
        writer.put(gate.wait, 1)
        with pytest.raises(Late):
            await writer.run(lambda: begun.append(1), 0.01)
        writer.put(lambda: begun.append(2), 1)
        assert await writer.close(lambda: begun.append(3), 0.01) == 4

    asyncio.run(main())
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "writer of one that hangs":
            assert thread.daemon  # so that the process ends
            thread.join(20)
            assert not thread.is_alive()
    assert not begun and not raised


def test_who_stops_waiting_leaves_no_noise_behind(caplog):
    """The loop is closed when the answer comes; what had not begun is not begun."""
    gc.collect()  # what other tests have left says so now
    caplog.clear()
    is_running, gate, begun = threading.Event(), threading.Event(), []
    writer = Writer("it", 10)

    def run():
        is_running.set()
        gate.wait()

    async def main():
        running = asyncio.create_task(writer.run(run, 20))
        waiting = asyncio.create_task(writer.run(lambda: begun.append(1), 20))
        await asyncio.sleep(0)
        assert is_running.wait(20)  # so that the other one cannot have begun
        running.cancel()
        waiting.cancel()
        await asyncio.wait([running, waiting])

    asyncio.run(main())
    gate.set()
    asyncio.run(writer.close(nothing, 20))
    assert not begun and not caplog.records


def test_a_job_that_is_done_is_not_late_where_the_loop_was_blocked():
    """By then the clock is past the deadline."""
    done = Future()
    done.set_result(None)
    asyncio.run(_wait(done, -1.0))
    with pytest.raises(Late):
        asyncio.run(_wait(Future(), -1.0))
