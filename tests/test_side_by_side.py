"""A worker of pytest's that crashes costs its test alone: all others run, and the whole ends."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.side_by_side import PROCESSES, WITHOUT_DEADLINES, SideBySide


class Worker:
    """As pytest-xdist's: it runs a test once it has the next one, or is told that there is none."""

    def __init__(self, number):
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.tests, self.shutting_down = [], False

    def send_runtest_some(self, tests):
        self.tests += tests

    def shutdown(self):
        self.shutting_down = True

    @property
    def can_run(self):
        return len(self.tests) >= 2 or (self.shutting_down and bool(self.tests))


def run(files, num_crashes, draw):
    """What has run, in any order. Two workers, each replaced where it crashes, as DSession does it.

    files: how many tests each has.
    """
    collection = [f"test_{file}.py::{test}" for file, count in enumerate(files) for test in range(count)]
    config = SimpleNamespace(getvalue=lambda _: ["2*popen"], option=SimpleNamespace(loadscopereorder=False))
    scheduler = SideBySide(config)
    workers, done, started = [], [], 0

    def start():
        nonlocal started
        workers.append(Worker(started))
        started += 1
        scheduler.add_node(workers[-1])
        scheduler.add_node_collection(workers[-1], collection)
        if scheduler.collection_is_completed:
            scheduler.schedule()

    start()
    start()
    while workers:
        if scheduler.tests_finished:
            for worker in scheduler.nodes:
                worker.shutdown()
        for worker in [worker for worker in workers if worker.shutting_down and not worker.tests]:
            workers.remove(worker)
            scheduler.remove_node(worker)
        if not workers:
            break
        able = [worker for worker in workers if worker.can_run]
        assert able, f"nobody goes on; waiting with {[worker.tests for worker in workers]}"
        worker = draw.choice(able)
        if num_crashes and draw.random() < 0.1:
            num_crashes -= 1
            workers.remove(worker)
            scheduler.remove_node(worker)
            start()
            continue
        test = worker.tests.pop(0)
        done.append(collection[test])
        scheduler.mark_test_complete(worker, test)
    return collection, done


@pytest.mark.parametrize("num_crashes", [0, 1, 3])
def test_every_test_runs_once_however_workers_crash(num_crashes):
    for seed in range(300):
        draw = random.Random(seed)
        files = [draw.randint(1, 6) for _ in range(draw.randint(2, 8))]
        collection, done = run(files, num_crashes, draw)
        assert sorted(done) == sorted(collection), seed


def test_tests_that_start_processes_are_one_scope_but_for_those_that_may_share_the_cores():
    root = Path(__file__).parent.parent
    scheduler = SideBySide(SimpleNamespace(getvalue=lambda _: ["2*popen"]))
    for name in PROCESSES:
        assert (root / name).exists() and scheduler._split_scope(f"{name}x::test") == "processes"
    assert (root / WITHOUT_DEADLINES).is_file() and WITHOUT_DEADLINES.startswith(PROCESSES)
    assert scheduler._split_scope(f"{WITHOUT_DEADLINES}::test[a-b]") == WITHOUT_DEADLINES
    assert scheduler._split_scope("tests/test_pages.py::test") == "tests/test_pages.py"
