"""What a recorder writes, in which thread, and what it keeps of a run that goes on from an earlier step."""

import asyncio
import io
import json
import logging
import math
import os
import re
import threading
from contextlib import nullcontext, suppress
from functools import partial

import pytest

from rl.errors import RunError
from rl.observability import files
from rl.observability.json_lines import JsonLines, read_records
from rl.observability.recorder import Recorder
from rl.observability.rollout_log import MAX_FAILED, RolloutLog
from rl.observability.sinks import Sinks
from rl.observability.timeline import Timeline
from rl.observability.watches import LossWatch
from rl.types import Score
from tests.controller.test_training_batch import group
from tests.observability.test_sinks import Hanging, Keeping
from tests.observability.test_timeline import Clock

METRICS = {"reward/mean": 0.5, "logprob_diff/mean": 0.0, "loss": 1.0}
EVALUATION = {"eval/accuracy": 0.5, "eval/standard_error": 0.1}


def step(recorder, number, *groups):
    recorder.step(number, {**METRICS, "reward/mean": number / 10}, groups)


def steps_in(directory, name="metrics.jsonl"):
    return [line["step"] for line in read_records(directory / name)]


def test_what_comes_after_the_step_is_forgotten_with_a_line_that_was_cut_short(tmp_path):
    async def first():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({})) as recorder:
            for number in range(1, 6):
                step(recorder, number)
                recorder.evaluation(number, EVALUATION, [])

    asyncio.run(first())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "reward/me')
    (tmp_path / "batches").mkdir()
    for name in ("step-2", "step-3", "step-4", "step-5", "mine", "step-x"):
        (tmp_path / "batches" / f"{name}.pkl").touch()

    async def again():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({})) as recorder:
            await recorder.rewind(3)
            assert list(recorder.rewards) == list(recorder.accuracies) == [1, 2, 3]
            recorder.evaluation(4, {"eval/accuracy": 0.25, "eval/standard_error": 0.1}, [])
            await recorder.flush()
            *kept, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert kept == lines[:6] and json.loads(last)["eval/accuracy"] == 0.25
            left = {path.name for path in (tmp_path / "batches").iterdir()}
            assert left == {"step-2.pkl", "step-3.pkl", "mine.pkl", "step-x.pkl"}
            await recorder.rewind(-1)
        assert (tmp_path / "metrics.jsonl").read_text() == ""

    asyncio.run(again())


def shown(tmp_path, body, timeline=None, num_steps=9):
    """The lines that a user sees, and the lines of metrics.jsonl."""
    out = io.StringIO()

    async def main():
        async with Recorder(tmp_path, num_steps, timeline or Timeline(), Sinks({}), out=out) as recorder:
            body(recorder)
            return dict(recorder.rewards)

    rewards = asyncio.run(main())
    return out.getvalue().splitlines(), list(read_records(tmp_path / "metrics.jsonl")), rewards


def test_a_line_says_the_newest_held_out_accuracy_and_of_which_step(tmp_path):
    def body(recorder):
        recorder.evaluation(0, {**EVALUATION, "eval/accuracy": 0.25}, [])
        step(recorder, 1, group(1))
        recorder.evaluation(1, {**EVALUATION, "eval/accuracy": 0.75}, [])
        step(recorder, 2, group(1))
        recorder.step(3, {**METRICS, "logprob_diff/mean": 0.0}, [])

    lines, _, rewards = shown(tmp_path, body, num_steps=3)
    told = [line.partition("  gap ")[0] for line in lines if "reward " in line or "loss " in line]
    assert told[0] == "step 1/3  reward 0.100  held-out 0.250 (step 0)"
    assert told[-1].startswith("step 3/3  loss 1.0000  held-out 0.750 (step 1)")
    assert rewards == {1: 0.1, 2: 0.2, 3: 0.5}  # what the curve is drawn of


def test_an_evaluation_says_its_reward_where_that_is_no_accuracy(tmp_path):
    """As a judge's, which is seldom as high as 1."""

    def body(recorder):
        recorder.evaluation(0, {**EVALUATION, "eval/accuracy": 0.25, "eval/reward": 0.25}, [])
        recorder.evaluation(1, {**EVALUATION, "eval/accuracy": 0.0, "eval/reward": 0.4816}, [])

    lines, _, _ = shown(tmp_path, body)
    assert [line for line in lines if "accuracy" in line] == [
        "step 0: held-out accuracy 0.250 on 0 problems",
        "step 1: held-out accuracy 0.000 on 0 problems, reward 0.482",
    ]


def test_that_nothing_was_learned_is_said_once(tmp_path):
    def body(recorder):
        for number in range(1, 5):
            recorder.step(number, {**METRICS, "advantages/nonzero": 0 if number > 1 else 0.5}, [])

    lines, _, _ = shown(tmp_path, body)
    (message,) = [line for line in lines if "no rollout had an advantage" in line]
    assert message.startswith("step 2:")


@pytest.mark.parametrize("pause", [True, False])
def test_the_time_of_an_evaluation_that_training_waits_for_is_no_steps(tmp_path, pause):
    clock = Clock()
    timeline = Timeline(clock=clock)

    def body(recorder):
        step(recorder, 1)
        clock.now += 60.0  # the evaluation
        recorder.evaluation(1, EVALUATION, [], -math.inf if pause else None)
        clock.now += 2.0
        step(recorder, 2)

    lines, records, _ = shown(tmp_path, body, timeline, num_steps=4)
    seconds = 2.0 if pause else 62.0
    assert [r["time/step"] for r in records if "time/step" in r] == [0.0, seconds]
    assert lines[0].startswith("step 1/4") and "  0.00 s/step" in lines[0]


def test_the_rest_of_a_run_takes_as_long_a_step_as_those_before(tmp_path):
    clock = Clock()

    def body(recorder):
        for number, seconds in ((1, 10.0), (2, 30.0), (10, 80.0)):
            clock.now += seconds
            step(recorder, number)

    lines, _, _ = shown(tmp_path, body, Timeline(clock=clock), num_steps=12)
    told = [line[line.index(" s/step") - 5 :] for line in lines if "s/step" in line]
    assert told[0] == "10.00 s/step  ETA 1:50" and told[-1] == "80.00 s/step  ETA 1:20"


def test_a_line_is_there_as_soon_as_it_is_said(tmp_path):
    """Also where the output is a file, as under nohup."""
    with (tmp_path / "output").open("w") as out:

        async def main():
            async with Recorder(tmp_path, 9, Timeline(), Sinks({}), out=out) as recorder:
                step(recorder, 1)
                return (tmp_path / "output").read_text()

        assert asyncio.run(main()).startswith("step 1/9")


def test_what_still_waits_is_written_before_steps_are_forgotten(tmp_path):
    gate, keeping = threading.Event(), Keeping()

    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({"x": lambda: keeping})) as recorder:
            writing = asyncio.create_task(recorder.write(gate.wait))
            await asyncio.sleep(0)
            for number in range(1, 6):
                step(recorder, number, group(1))
            forgetting = asyncio.create_task(recorder.rewind(3))
            await asyncio.sleep(0)
            step(recorder, 4, group(1))
            assert steps_in(tmp_path) == []
            gate.set()
            await writing
            await forgetting
            await recorder.flush()
            assert steps_in(tmp_path) == steps_in(tmp_path, "rollouts.jsonl") == [1, 2, 3, 4]

    asyncio.run(main())
    assert [number for number, _ in keeping.seen] == [1, 2, 3, 4]


def test_a_sink_that_hangs_holds_up_neither_a_step_nor_the_end(tmp_path):
    hanging, out = Hanging(), io.StringIO()

    async def main():
        sinks = Sinks({"mlflow": lambda: hanging}, close_seconds=0.02)
        async with Recorder(tmp_path, 3, Timeline(), sinks, out=out) as recorder:
            for number in (1, 2, 3):
                step(recorder, number)

    asyncio.run(main())
    assert steps_in(tmp_path) == [1, 2, 3]
    assert "mlflow did not end within 0 s and is left alone" in out.getvalue()
    assert "mlflow lacks the metrics of 3 steps and evaluations" in out.getvalue()
    hanging.gate.set()


def test_an_interrupt_while_files_are_closed_leaves_no_sink_open(tmp_path, monkeypatch):
    gate, keeping = threading.Event(), Keeping()
    monkeypatch.setattr(JsonLines, "append", lambda self, line: gate.wait())

    async def main():
        async def body():
            async with Recorder(
                tmp_path, 3, Timeline(), Sinks({"x": lambda: keeping}), out=io.StringIO()
            ) as r:
                step(r, 1)

        running = asyncio.create_task(body())
        await asyncio.sleep(0.05)  # it waits for the disk
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert keeping.closed is True  # as that of a run that failed
    gate.set()


@pytest.mark.parametrize("fails", [False, True])
def test_a_disk_that_hangs_ends_the_run_with_its_name(tmp_path, monkeypatch, fails):
    gate, out = threading.Event(), io.StringIO()
    monkeypatch.setattr(JsonLines, "append", lambda self, line: gate.wait())

    async def main():
        async with Recorder(tmp_path, 3, Timeline(), Sinks({}), out=out, write_seconds=0.02) as recorder:
            step(recorder, 1)
            if fails:
                raise ValueError("of the run")
            with pytest.raises(
                RunError, match=r"has not taken what was written within deadlines.checkpoint=0 s"
            ):
                await recorder.flush()

    with pytest.raises(ValueError if fails else RunError) as raised:
        asyncio.run(main())
    message = out.getvalue() if fails else str(raised.value)
    assert f"{tmp_path} has not taken what was written within 0 s: the ends of metrics.jsonl" in message
    gate.set()


def test_rollouts_that_the_disk_is_too_slow_for_are_dropped_and_metrics_are_not(tmp_path, monkeypatch):
    gate, out = threading.Event(), io.StringIO()
    monkeypatch.setattr(files, "_MAX_BYTES", 2000)

    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({}), out=out) as recorder:
            writing = asyncio.create_task(recorder.write(gate.wait))
            await asyncio.sleep(0)
            for number in range(1, 6):
                step(recorder, number, group(1))
            gate.set()
            await writing

    asyncio.run(main())
    kept = steps_in(tmp_path, "rollouts.jsonl")
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5] and kept == list(range(1, len(kept) + 1)) and len(kept) < 5
    assert out.getvalue().count("does not keep up: rollouts.jsonl loses what is not written yet") == 1
    assert f"rollouts.jsonl lacks {5 - len(kept)} steps and evaluations" in out.getvalue()


def test_metrics_that_no_disk_takes_end_the_run(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(files, "_MAX_BYTES", 1000)

    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({})) as recorder:
            with suppress(TimeoutError):
                await asyncio.wait_for(recorder.write(gate.wait), 0.01)
            try:
                for number in range(1, 99):
                    step(recorder, number)
            finally:
                gate.set()

    with pytest.raises(RunError, match=r"the directory .* does not keep up: \d+ writes wait for it"):
        asyncio.run(main())


class NoJSON:
    def __str__(self):
        raise ZeroDivisionError("it has no words")


def test_only_the_disk_ends_a_run_and_not_what_an_environment_noted(tmp_path, monkeypatch):
    out = io.StringIO()

    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({}), out=out) as recorder:
            step(recorder, 1, group(Score(1.0, notes={"x": NoJSON()})))
            step(recorder, 2, group(1))
            await recorder.flush()
            monkeypatch.setattr(
                RolloutLog, "write", lambda *_: (_ for _ in ()).throw(OSError(5, "it is gone"))
            )
            step(recorder, 3, group(1))
            with pytest.raises(OSError, match="it is gone"):
                await recorder.flush()

    asyncio.run(main())
    assert steps_in(tmp_path, "rollouts.jsonl") == [1, 2] and steps_in(tmp_path) == [1, 2, 3]
    (first, _) = (json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert first["notes"] == {"x": "<NoJSON>"}


def test_an_evaluation_has_its_rollouts_before_its_metrics(tmp_path, monkeypatch):
    """Killed in between, it happens again; the other way round its rollouts would be lost."""
    write, before = RolloutLog.write, []

    def watched(log, number, split, rows):
        before.append((split, steps_in(tmp_path)))
        write(log, number, split, rows)

    monkeypatch.setattr(RolloutLog, "write", watched)

    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({})) as recorder:
            for number in (1, 2):
                recorder.evaluation(number, EVALUATION, [group(1, 0)])

    asyncio.run(main())
    assert before == [("eval", []), ("eval", [1])] and steps_in(tmp_path) == [1, 2]


def test_how_many_failed_and_how_many_of_them_are_recorded(tmp_path):
    out = io.StringIO()

    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({}), out=out, num_rollouts=0) as recorder:
            for number, count in ((1, MAX_FAILED), (2, 1000)):
                step(recorder, number, group(*[Score(0.0, "ValueError: x", cause="raised")] * count))

    asyncio.run(main())
    assert (
        f"step 1: {MAX_FAILED} rewards failed, the first: ValueError: x (all: rollouts.jsonl)"
        in out.getvalue()
    )
    assert f"step 2: 1000 rewards failed, the first: ValueError: x ({MAX_FAILED}, of each" in out.getvalue()
    assert steps_in(tmp_path, "rollouts.jsonl") == [1] * MAX_FAILED + [2] * MAX_FAILED


def test_a_run_that_is_started_again_has_a_trace_of_each_start(tmp_path):
    async def main(verb):
        timeline = Timeline(with_trace=True)
        async with Recorder(tmp_path, 9, timeline, Sinks({})) as recorder:
            with timeline.span("trainer", verb):
                pass
            recorder.evaluation(0, EVALUATION, [])
            with timeline.span("trainer", "save_hf"):
                pass

    for verb in ("forward", "optim_step"):
        asyncio.run(main(verb))
    for name, verb in (("trace.json", "forward"), ("trace-2.json", "optim_step")):
        events = json.loads((tmp_path / name).read_text())
        assert [event["name"] for event in events if event["ph"] == "X"] == [verb, "save_hf"]
    assert len(list(tmp_path.glob("trace*"))) == 2


def test_watches_begin_anew_with_steps_that_happen_again(tmp_path):
    """A loss that falls twice is none that rises."""
    out = io.StringIO()

    async def main():
        watches = [partial(LossWatch, "trainer.lr")]
        async with Recorder(tmp_path, 9, Timeline(), Sinks({}), watches, out=out) as recorder:
            for life in range(2):
                for number in range(1, 7):
                    recorder.warmup(number, 6, 4.0 / number)
                for number in range(1, 7):
                    recorder.step(number, {**METRICS, "loss": 4.0 / number}, [])
                if life == 0:
                    await recorder.rewind(0)
            recorder.step(7, {**METRICS, "loss": 9.0}, [])

    asyncio.run(main())
    assert [line for line in out.getvalue().splitlines() if "loss rises" in line] == [
        "step 7: the loss rises: 3.49 over the last 3 steps, after 0.82 at best; lower trainer.lr"
    ]


class Terminal(io.StringIO):
    """Rows of so many columns, as a user sees them."""

    def __init__(self, columns):
        super().__init__()
        self._columns = columns

    def isatty(self):
        return True

    def rows(self):
        rows, at = [""], 0
        for part in re.split(r"(\r|\n|\x1b\[2K)", self.getvalue()):
            if part == "\n":
                rows.append("")
            elif part == "\x1b[2K":
                rows[-1] = ""
            elif part != "\r":
                for at in range(0, len(part), self._columns):
                    rows[-1] += part[at : at + self._columns]
                    if at + self._columns < len(part):
                        rows.append("")
        return [row for row in rows if row]


def test_on_a_narrow_terminal_each_line_overwrites_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal(40)

    async def main():
        async with Recorder(tmp_path, 1000, Timeline(), Sinks({}), out=out) as recorder:
            for number in range(2, 9):
                step(recorder, number, group(1))
            recorder.say("going on from the beginning")
            step(recorder, 9, group(1))
            logging.getLogger("rl.x").warning("generator-0 died")

    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(out)])
    asyncio.run(main())
    assert out.rows() == ["going on from the beginning", "generator-0 died"]


def test_where_nothing_was_evaluated_a_steps_line_says_nothing_of_it(tmp_path):
    lines, _, _ = shown(tmp_path, lambda recorder: step(recorder, 1, group(1)), Timeline(clock=Clock()))
    assert lines == ["step 1/9  reward 0.100  gap 0.0e+00  0.00 s/step  ETA 0:00"]


def test_a_warm_up_is_tracked_and_a_loss_that_rises_in_it_is_told(tmp_path):
    keeping, out = Keeping(), io.StringIO()
    losses = [1.0, 1.0, 1.0, 1.3, 1.6, 1.9, 2.2]

    async def main():
        sinks = Sinks({"x": lambda: keeping})
        async with Recorder(tmp_path, 9, Timeline(clock=Clock()), sinks, out=out) as recorder:
            for number, loss in enumerate(losses, 1):
                recorder.warmup(number, len(losses), loss)

    asyncio.run(main())
    assert keeping.seen == [(number, {"warmup/loss": loss}) for number, loss in enumerate(losses, 1)]
    assert out.getvalue().splitlines() == [
        "warm-up 1/7  loss 1.000",
        "warm-up 6: the loss rises: 1.60 over the last 3 steps, after 1.00 at best; lower warmup.lr",
        "warm-up 7/7  loss 2.200",
    ]


def test_of_quick_steps_each_tenth_has_a_line_and_one_after_ten_silent_seconds(tmp_path):
    clock = Clock()

    def body(recorder):
        for number in range(1, 26):
            clock.now += 11.0 if number == 15 else 0.01
            step(recorder, number)

    lines, _, _ = shown(tmp_path, body, Timeline(clock=clock), num_steps=25)
    assert [line.split("/")[0] for line in lines] == [f"step {number}" for number in (1, 10, 15, 20, 25)]


def test_steps_of_three_seconds_that_are_not_shown_do_not_break_the_silence(tmp_path):
    clock = Clock()

    def body(recorder):
        for number in range(1, 26):
            clock.now += 3.0
            step(recorder, number)

    lines, _, _ = shown(tmp_path, body, Timeline(clock=clock), num_steps=25)
    kept = (1, 5, 9, 10, 14, 18, 20, 24, 25)
    assert [line.split("/")[0] for line in lines] == [f"step {number}" for number in kept]


@pytest.mark.parametrize("fails", [False, True])
def test_sinks_are_told_whether_the_run_failed(tmp_path, fails):
    keeping = Keeping()

    async def run():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({"keeping": lambda: keeping})) as recorder:
            step(recorder, 1)
            if fails:
                raise RunError("the run fails")

    with pytest.raises(RunError, match="the run fails") if fails else nullcontext():
        asyncio.run(run())
    assert keeping.closed is fails


def test_what_could_not_be_measured_is_null(tmp_path):
    def body(recorder):
        recorder.step(1, {**METRICS, "a": math.nan, "b": math.inf, "c": 2.0}, [])

    _, (record,), _ = shown(tmp_path, body)
    assert [record[name] for name in "abc"] == [None, None, 2.0]


def test_what_was_before_the_steps_or_is_forgotten_is_no_steps_time(tmp_path):
    clock = Clock()

    async def main():
        async with Recorder(tmp_path, 9, Timeline(clock=clock), Sinks({}), out=io.StringIO()) as recorder:
            clock.now = 50.0
            recorder.begin_steps()
            clock.now = 52.0
            step(recorder, 1)
            clock.now = 82.0  # an engine has died, and started again
            await recorder.rewind(1)
            clock.now = 85.0
            step(recorder, 2)

    asyncio.run(main())
    assert [line["time/step"] for line in read_records(tmp_path / "metrics.jsonl")] == [2.0, 3.0]


def test_rollouts_of_an_evaluation_stay_where_its_metrics_do(tmp_path):
    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({}), out=io.StringIO()) as recorder:
            recorder.evaluation(0, EVALUATION, [group(1)])
            step(recorder, 1, group(1))
            recorder.rollouts(1, "eval", [group(0)])  # of one that failed then
            await recorder.rewind(1)

    asyncio.run(main())
    lines = [(line["step"], line["split"]) for line in read_records(tmp_path / "rollouts.jsonl")]
    assert lines == [(0, "eval"), (1, "train")]


def test_what_is_flushed_is_on_the_disk(tmp_path, monkeypatch):
    synced = set()

    def note(number):
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))

    monkeypatch.setattr(os, "fsync", note)

    async def main():
        async with Recorder(tmp_path, 9, Timeline(), Sinks({}), out=io.StringIO()) as recorder:
            step(recorder, 1, group(1))
            await recorder.flush()
            assert {"metrics.jsonl", "rollouts.jsonl"} <= synced

    asyncio.run(main())


def test_a_run_that_has_failed_does_not_wait_long_for_its_disk(tmp_path, monkeypatch):
    gate, out = threading.Event(), io.StringIO()
    monkeypatch.setattr(files, "_HASTE_SECONDS", 0.02)
    monkeypatch.setattr(JsonLines, "append", lambda self, line: gate.wait())

    async def main():
        async with Recorder(tmp_path, 3, Timeline(), Sinks({}), out=out, write_seconds=2.0) as recorder:
            step(recorder, 1)
            raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        asyncio.run(main())
    gate.set()
    assert f"{tmp_path} has not taken what was written within 0 s" in out.getvalue()


def test_rollouts_that_cannot_be_recorded_are_told_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(RolloutLog, "write", lambda *_: 1 / 0)

    def body(recorder):
        for number in (1, 2):
            step(recorder, number, group(1))

    lines, records, _ = shown(tmp_path, body)
    why = "train rollouts are not recorded: ZeroDivisionError: division by zero"
    assert [line for line in lines if "recorded" in line] == [f"step {number}: {why}" for number in (1, 2)]
    assert [record["step"] for record in records] == [1, 2]
