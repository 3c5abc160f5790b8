"""What one rank does alone: where it fails, every rank raises, and none waits in a collective for another."""

import ast
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from rl.errors import RunError
from rl.models import agreement
from rl.models.adapters import Adapters
from rl.models.export import whole_tensors, write_directory

NUM_RANKS = 2
NUM_TENSORS = 3
MODELS = Path(agreement.__file__).parent
NO_WRITING = {
    ("export.py", "_speaks_for"),  # whether a rank exports a shard
    ("hf_engine.py", "_take_from_first_rank"),  # what is broadcast
    ("hf_engine.py", "_model_shards"),  # what is published
}
AGREED_LATER = {("checkpoint.py", "_finish")}  # in the writing thread; `wait` has all ranks agree


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)


class Wordless(Exception):
    """Neither its words nor itself can be sent."""

    def __str__(self):
        raise ValueError("no words")

    def __reduce__(self):
        raise TypeError("no pickling")


class Ranks:
    """A process group of threads. A rank that waits for one that has left fails after a second."""

    def __init__(self, monkeypatch):
        self._rank = threading.local()
        self._barrier = threading.Barrier(NUM_RANKS, timeout=1.0)
        self._objects: list = [None] * NUM_RANKS
        self.num_gathers = [0] * NUM_RANKS
        monkeypatch.setattr(dist, "get_rank", lambda *_: self._rank.number)
        monkeypatch.setattr(dist, "get_world_size", lambda *_: NUM_RANKS)
        monkeypatch.setattr(dist, "all_gather_object", self._all_gather)

    def _all_gather(self, objects, one, group=None):
        self._objects[self._rank.number] = one
        self._barrier.wait()
        objects[:] = self._objects
        self._barrier.wait()

    def tensors(self):
        """As `whole_tensors`: each is gathered on every rank."""
        for i in range(NUM_TENSORS):
            self._barrier.wait()
            self.num_gathers[self._rank.number] += 1
            yield f"t{i}", torch.zeros(1)

    def run(self, part):
        """What each rank raised, or None."""

        def one(rank):
            self._rank.number = rank
            try:
                part()
            except Exception as error:
                return error

        with ThreadPoolExecutor(NUM_RANKS) as threads:
            return list(threads.map(one, range(NUM_RANKS)))


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


FAILURES = [
    OSError(28, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc] unexpected pos"),
    MemoryError(),
    Unpicklable("one", "two"),
    StopIteration(),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("after", range(NUM_TENSORS + 1))
def test_all_ranks_raise_what_the_writer_raised_wherever_it_was(ranks, tmp_path, failure, after):
    def write(out_dir, tensors):
        for _ in range(after):
            next(tensors)
        raise failure

    raised = ranks.run(lambda: write_directory(tmp_path, ranks.tensors(), write))
    assert all(isinstance(error, RunError) for error in raised), raised
    assert {str(error) for error in raised} == {str(raised[0])}
    assert f"{tmp_path} could not be written: {type(failure).__name__}" in str(raised[0])
    assert ranks.num_gathers == [NUM_TENSORS] * NUM_RANKS


@pytest.mark.parametrize("failing", range(NUM_RANKS))
@pytest.mark.parametrize("at", range(NUM_TENSORS))
def test_so_they_do_where_a_rank_has_no_memory_for_a_tensor(ranks, monkeypatch, tmp_path, failing, at):
    """Every rank takes part in every gather."""

    def gather(tensor):
        ranks._barrier.wait()
        ranks.num_gathers[dist.get_rank()] += 1
        return tensor

    def split(name, size):
        if name == f"t{at}" and dist.get_rank() == failing:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("rl.models.export.whole", gather)
    tensors = {f"t{i}": torch.zeros(1) for i in range(NUM_TENSORS)}

    def part():
        whole = whole_tensors(tensors, torch.float32, split)
        write_directory(tmp_path, whole, lambda out_dir, tensors: dict(tensors))

    raised = ranks.run(part)
    assert all(isinstance(error, RunError) and "can't allocate memory" in str(error) for error in raised), (
        raised
    )
    assert ranks.num_gathers == [NUM_TENSORS] * NUM_RANKS


@pytest.mark.parametrize("failure", FAILURES[:-1], ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("failing", range(NUM_RANKS))
def test_whichever_rank_fails_all_raise(ranks, failure, failing):
    def part():
        with agreement.agreed():
            if dist.get_rank() == failing:
                raise failure

    raised = ranks.run(part)
    assert raised[failing] is failure
    assert all(str(failure) in str(error) for error in raised if error is not None)
    assert None not in raised


@pytest.mark.parametrize("reason", [None, agreement.not_written("out")])
@pytest.mark.parametrize("failing", range(NUM_RANKS))
def test_so_they_do_where_the_error_has_no_words(ranks, reason, failing):
    def part():
        with agreement.agreed(reason):
            if dist.get_rank() == failing:
                raise Wordless

    raised = ranks.run(part)
    assert "Wordless" in str(raised[1 - failing]), raised
    assert isinstance(raised[failing], Wordless if reason is None else RunError)


@pytest.mark.parametrize("failing", range(NUM_RANKS))
def test_so_they_do_where_the_reason_cannot_be_told(ranks, failing):
    """As one that asks a disk which is gone for its free space."""

    def reason(failure):
        raise OSError("stale file handle")

    def part():
        with agreement.agreed(reason):
            if dist.get_rank() == failing:
                raise ValueError("x")

    assert [str(error) for error in ranks.run(part)] == ["x"] * NUM_RANKS


@pytest.mark.parametrize("writer", ["write_adapter", "save_file"])
def test_an_adapter_that_cannot_be_written_fails_on_every_rank(ranks, monkeypatch, tmp_path, writer):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(f"rl.models.adapters.{writer}", full)
    adapters = mock.Mock(spec=Adapters)
    adapters.__getitem__ = lambda *_: mock.Mock(parameters={}, lora=None)
    adapters.learner = lambda _: mock.Mock(state=lambda: {})
    adapters.save = lambda *args: Adapters.save(adapters, *args) if writer == "write_adapter" else None
    raised = ranks.run(lambda: Adapters.save_state(adapters, "policy", tmp_path, "base"))
    assert all(isinstance(error, RunError) for error in raised), raised
    assert "No space left" in str(raised[1])


def on_a_rank(test):
    """Whether a condition asks for a rank of torch.distributed."""
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(test)}
    zero = any(isinstance(node, ast.Constant) and node.value == 0 for node in ast.walk(test))
    return "get_rank" in names or (
        isinstance(test, ast.Compare) and zero and any(name.endswith("rank") for name in names)
    )


def conditions(path):
    """(function, whether within `with agreed(...)`) of each condition on a rank."""
    places = []

    def visit(node, function, is_agreed):
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            is_agreed = is_agreed or any(getattr(call.func, "id", "") == "agreed" for call in calls)
        test = getattr(node, "test", None)
        if (isinstance(node, ast.Compare) and on_a_rank(node)) or (test is not None and on_a_rank(test)):
            places.append((function, is_agreed))
        for child in ast.iter_child_nodes(node):
            visit(child, function, is_agreed)

    visit(ast.parse(path.read_text()), "", False)
    return places


def test_nothing_else_is_done_on_one_rank():
    alone, agreed = set(), set()
    for path in MODELS.rglob("*.py"):
        for function, is_agreed in conditions(path):
            (agreed if is_agreed else alone).add((path.name, function))
    assert alone == NO_WRITING | AGREED_LATER
    assert agreed == {
        ("adapters.py", "save"),
        ("adapters.py", "save_state"),
        ("checkpoint.py", "save"),
        ("export.py", "write_directory"),
        ("hf_engine.py", "_build"),
        ("hf_engine.py", "_read_on_first_rank"),
        ("hf_engine.py", "load_weights"),
    }


def test_what_moves_tensors_on_one_rank_writes_no_file():
    for file, function in NO_WRITING:
        tree = ast.parse((MODELS / file).read_text())
        (node,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
        names = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node)}
        words = ("write", "save", "open", "mkdir", "unlink", "rmtree", "dump")
        assert not {name for name in names if name.startswith(words)}
