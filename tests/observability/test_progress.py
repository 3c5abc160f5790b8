"""Until the first step there is a line every ten seconds, which says what is waited for. On a virtual clock."""

# holds: exact

import asyncio
import io
from contextlib import ExitStack
from itertools import pairwise

import pytest

from rl.actors.births import Births
from rl.observability.recorder import Recorder
from rl.observability.sinks import Sinks
from rl.observability.timeline import Timeline
from rl.waiting import beside
from tests.virtual_time import run_virtually

EVALUATION = {"eval/accuracy": 0.5, "eval/standard_error": 0.1}
STEP = {"reward/mean": 0.5, "logprob_diff/mean": 0.0, "loss": 1.0}


class Screen(io.StringIO):
    """Notes when each line came."""

    def __init__(self, is_terminal):
        super().__init__()
        self.times, self._is_terminal = [0.0], is_terminal

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        if text.strip():
            self.times.append(asyncio.get_running_loop().time())
        return super().write(text)


def played(run_dir, is_terminal, start, warmup, evaluation, step, after=0.0):
    """The screen of a run whose parts take so many seconds."""
    screen = Screen(is_terminal)

    async def main():
        timeline = Timeline(clock=asyncio.get_running_loop().time)
        recorder = Recorder(run_dir, 3, timeline, Sinks({}), out=screen)
        async with recorder, beside(recorder.break_silence()):
            births = [Births("generator-0", timeline), Births("trainer", timeline)]
            await asyncio.gather(
                *(b.watching(asyncio.sleep(start * s)) for b, s in zip(births, (1, 0.5), strict=True))
            )
            for number in range(1, 4):
                with timeline.span("trainer", "forward_backward"):
                    await asyncio.sleep(warmup)
                recorder.warmup(number, 3, 0.5)
            with timeline.span("generator-0", "sample"), timeline.span("generator-0", "sample"):
                await asyncio.sleep(evaluation)
            recorder.evaluation(0, EVALUATION, [])
            await asyncio.sleep(step)
            recorder.step(1, STEP, [])
            screen.first_step = asyncio.get_running_loop().time()
            await asyncio.sleep(after)

    run_virtually(main())
    return screen


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(
    "seconds", [(0, 0, 0, 0), (95, 0, 0, 0), (3, 27, 0, 9), (9, 9, 9, 9), (0, 1, 301, 14)]
)
def test_no_ten_seconds_without_a_line(seconds, is_terminal, tmp_path):
    screen = played(tmp_path, is_terminal, *seconds)
    gaps = [after - before for before, after in pairwise(screen.times)]
    assert max(gaps) <= 10.0 + 0.2
    assert min(gaps[:-2] or [0]) >= 0


def test_a_line_names_what_is_waited_for_and_so_does_the_file(tmp_path):
    screen = played(tmp_path, False, 25, 0, 35, 15)
    lines = [line for line in screen.getvalue().splitlines() if ": waiting for " in line]
    assert lines[:2] == [
        "10 s: waiting for generator-0 to start (10 s), trainer to start (10 s)",
        "20 s: waiting for generator-0 to start (20 s)",
    ]
    assert lines[2].endswith("waiting for generator-0 to sample (2 calls, 10 s)")
    assert lines[-1].endswith("waiting for the controller")
    written = (tmp_path / "progress.log").read_text().splitlines()
    assert [line.partition(" waiting ")[2] for line in written] == [
        line.partition(" waiting ")[2] for line in lines
    ]


def test_steps_tell_of_themselves(tmp_path):
    screen = played(tmp_path, False, 0, 0, 0, 0, after=500)
    assert screen.times[-1] == screen.first_step and not (tmp_path / "progress.log").exists()


def test_a_warm_up_of_short_steps_tells_how_far_it_is(tmp_path):
    screen = Screen(is_terminal=False)

    async def main():
        timeline = Timeline(clock=asyncio.get_running_loop().time)
        recorder = Recorder(tmp_path, 3, timeline, Sinks({}), out=screen)
        async with recorder, beside(recorder.break_silence()):
            for number in range(1, 61):
                with timeline.span("trainer", "forward_backward"):
                    await asyncio.sleep(0.9)
                recorder.warmup(number, 60, 2.0)

    run_virtually(main())
    lines = screen.getvalue().splitlines()
    assert not [line for line in lines if "waiting" in line]
    steps = [int(line.partition("warm-up ")[2].partition("/")[0]) for line in lines]
    assert steps[0] == 1 and steps[-1] == 60 and max(b - a for a, b in pairwise(steps)) <= 12


@pytest.mark.parametrize(("number", "more"), [(4, ""), (6, " and 2 more")])
def test_of_many_that_are_waited_for_four_are_named(tmp_path, number, more):
    screen = Screen(is_terminal=False)

    async def main():
        timeline = Timeline(clock=asyncio.get_running_loop().time)
        recorder = Recorder(tmp_path, 3, timeline, Sinks({}), out=screen)
        async with recorder, beside(recorder.break_silence()):
            with ExitStack() as stack:
                for i in range(number):
                    stack.enter_context(timeline.span(f"generator-{i}", "sample"))
                await asyncio.sleep(15)

    run_virtually(main())
    named = ", ".join(f"generator-{i} to sample (10 s)" for i in range(4))
    assert screen.getvalue().splitlines() == [f"10 s: waiting for {named}{more}"]
