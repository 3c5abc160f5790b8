"""What a run writes: never in the thread of its event loop, and all of it before a checkpoint that counts on it."""

import asyncio
import hashlib
import json
import threading
import time
from dataclasses import replace

import cloudpickle
import pytest

from rl.config.learning import learning_of
from rl.controller import held_groups
from rl.controller.stages import RunStages
from rl.models.tokenizer import HFTokenizer
from rl.observability import batches, rollout_log
from rl.observability.json_lines import JsonLines, read_records
from rl.observability.recorder import Recorder
from rl.observability.rollout_log import MAX_FAILED, read_whole_rollouts
from rl.observability.sinks import Sinks
from rl.observability.timeline import Timeline
from rl.observability.trace import TraceFile
from rl.types import Score, Segment
from tests.controller.fakes import FakeEngine, fake_actors
from tests.controller.test_recovery import config
from tests.controller.test_training_batch import group
from tests.observability.test_sinks import Keeping


def run(settings, directory, sinks):
    actors, _ = fake_actors(settings, directory)
    tokenizer = HFTokenizer(settings.model.materialize(directory))

    async def main():
        async with Recorder(directory, settings.steps, Timeline(with_trace=True), sinks) as recorder:
            await RunStages(learning_of(settings), settings.resume, actors, tokenizer, recorder).run()

    asyncio.run(main())


@pytest.fixture
def threads(monkeypatch):
    """Name of what writes -> the threads that it was called in."""
    seen = {}

    def watch(owner, name, key):
        function = getattr(owner, name)

        def call(*arguments, **options):
            seen.setdefault(key, set()).add(threading.get_ident())
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    watch(JsonLines, "append", "lines")
    watch(JsonLines, "sync", "sync")
    watch(TraceFile, "close", "trace")
    watch(rollout_log.gzip, "GzipFile", "whole rollouts")
    for module, key in ((held_groups, "held groups"), (batches, "batches")):
        monkeypatch.setattr(module, "cloudpickle", Pickling(seen, key))
    watch(Keeping, "log", "sink")
    watch(Keeping, "close", "sink's end")
    return seen


class Pickling:
    def __init__(self, seen, key):
        self.seen, self.key = seen, key

    def __getattr__(self, name):
        return getattr(cloudpickle, name)

    def dump(self, content, file):
        self.seen.setdefault(self.key, set()).add(threading.get_ident())
        cloudpickle.dump(content, file)


def test_nothing_is_written_in_the_thread_of_the_loop(tmp_path, threads):
    settings = config(record_batches=2, max_offpolicy_steps=1)
    run(settings, tmp_path, Sinks({"x": Keeping}))
    assert set(threads) == {
        "lines", "sync", "trace", "whole rollouts", "held groups", "batches", "sink", "sink's end"
    }  # fmt: skip
    assert all(threading.get_ident() not in idents for idents in threads.values())
    assert len(set.union(*threads.values())) == 2  # the files', the sink's
    assert (tmp_path / "batches" / "step-5.pkl").is_file() and (tmp_path / "trace.json").is_file()


@pytest.mark.parametrize("data", ["rollouts", "demonstrations"])
def test_a_checkpoint_comes_after_what_it_counts_on(tmp_path, monkeypatch, data):
    """However slow the disk: its step's line, and the groups that it names with a checksum."""
    saved, append, save = [], JsonLines.append, FakeEngine.save_checkpoint

    async def save_checkpoint(engine, path, state, *rest, **options):
        step = state["step"]
        lines = read_records(tmp_path / "metrics.jsonl")
        assert max(line["step"] for line in lines if "loss" in line) == step
        if data == "rollouts":
            content = (tmp_path / "held" / f"step-{step}.pkl").read_bytes()
            assert hashlib.blake2b(content, digest_size=16).hexdigest() == state["prompts"]["held"]
            assert {line["step"] for line in read_records(tmp_path / "rollouts.jsonl")} >= {step}
        saved.append(step)
        await save(engine, path, state, *rest, **options)

    monkeypatch.setattr(JsonLines, "append", lambda self, line: time.sleep(0.002) or append(self, line))
    monkeypatch.setattr(FakeEngine, "save_checkpoint", save_checkpoint)
    run(config(data=data), tmp_path, Sinks({}))
    assert saved == [2, 4, 5]


def test_an_interrupt_while_a_batch_is_kept_saves_the_step_before(tmp_path, monkeypatch):
    settings = config(record_batches=2, save_every=0)
    actors, _ = fake_actors(settings, tmp_path)
    tokenizer = HFTokenizer(settings.model.materialize(tmp_path))
    begun, gate = threading.Event(), threading.Event()

    def write(run_dir, step, *rest):
        if step == 3:
            begun.set()
            gate.wait()

    monkeypatch.setattr("rl.observability.recorder.write_batch", write)

    async def main():
        async with Recorder(tmp_path, settings.steps, Timeline(), Sinks({})) as recorder:
            task = asyncio.create_task(
                RunStages(learning_of(settings), settings.resume, actors, tokenizer, recorder).run()
            )
            while not begun.is_set():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()  # the checkpoint waits for its turn
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    state = json.loads((tmp_path / "checkpoints" / "step-2" / "record.json").read_text())["state"]
    assert state["step"] == 2 and len(state["prompts"]["unfinished"]) == settings.prompts_per_step


def test_the_loop_goes_on_while_failed_rollouts_of_many_tokens_are_written(tmp_path, monkeypatch):
    """1,000 of 32k tokens: what the loop's thread does for them is to choose; each lump of text is short."""
    tokens = list(range(32768))
    failed = Score(0.0, "ValueError: x", cause="raised")
    failures = group(*[failed] * 1000)
    segments = (Segment(tokens, True, [-0.5] * len(tokens)),)
    rollouts = tuple(replace(rollout, segments=segments) for rollout in failures.rollouts)
    failures = replace(failures, rollouts=rollouts)
    lumps, threads, dumps = [], set(), json.dumps

    def watched(value, **options):
        threads.add(threading.get_ident())
        lumps.append(len(value) if isinstance(value, list) else 1)
        return dumps(value, **options)

    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({}), num_rollouts=0) as recorder:
            monkeypatch.setattr(rollout_log.json, "dumps", watched)
            recorder._files.write_rollouts(1, "train", [failures], lambda _: ())
            await recorder.flush()
            monkeypatch.undo()

    asyncio.run(main())
    assert threading.get_ident() not in threads and max(lumps) == 1024
    whole = read_whole_rollouts(tmp_path, "train", 1)
    assert len(whole) == MAX_FAILED and whole[0]["branches"][0][0]["tokens"] == tokens


def test_a_batch_may_have_a_class_of_the_recipes(tmp_path):
    class Shelf:
        books = 3

    for step in (1, 2, 3):
        batches.write_batch(tmp_path, step, {"metadata": Shelf()}, 0.5, keep_last=2)
    content, entropy_coef = batches.read_batch(tmp_path, 3)
    assert content["metadata"].books == 3 and entropy_coef == 0.5
    assert [batches.has_batch(tmp_path, step) for step in (1, 2, 3)] == [False, True, True]
