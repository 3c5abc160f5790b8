"""Where a step's wall time went, on a clock that is set by hand."""

# holds: exact

import json
import runpy

import pytest

import rl.observability.timeline as timeline_module
from rl.observability.timeline import Timeline, covered
from rl.observability.trace import TraceFile
from tests.traced_memory import traced_memory


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_union_of_intervals():
    assert covered([]) == 0
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4


def test_a_clock_that_is_set_back_makes_no_span_negative(monkeypatch):
    """The system's clock may be set while a run lasts."""
    monkeypatch.setattr("time.time", iter(range(10**6, 0, -1)).__next__)
    timeline = runpy.run_path(timeline_module.__file__)["Timeline"]()  # read anew, with this clock
    with timeline.span("trainer", "forward_backward"):
        pass
    assert 0 <= timeline.window()["time/step"] < 60


def test_a_window_says_who_worked_who_was_idle_and_what_is_left_to_the_controller():
    clock = Clock()
    timeline = Timeline(clock=clock)
    with timeline.span("generator-0", "sample"):
        clock.now = 1.0
        with timeline.span("generator-1", "sample"):
            clock.now = 3.0
        clock.now = 4.0
    clock.now = 4.5  # nobody works
    with timeline.span("trainer", "forward_backward"):
        clock.now = 7.5
        with timeline.span("generator-0", "load_weights"):
            clock.now = 8.0
        clock.now = 9.0
        first = timeline.window()
        clock.now = 10.0
    expected = {
        "time/step": 9.0, "time/controller": 0.5, "time/generate": 4.0, "time/train": 4.5, "time/sync": 0.5,
        "idle/generator-0": 4.5, "idle/generator-1": 7.0, "idle/trainer": 4.5,
    }  # fmt: skip
    assert {name: pytest.approx(value) for name, value in expected.items()} == first
    clock.now = 12.0
    second = timeline.window()  # what was under way counts from the window's start
    assert second == {
        "time/step": 3.0, "time/controller": 2.0, "time/train": 1.0, "idle/trainer": 2.0, "idle/generator-0": 3.0,
        "idle/generator-1": 3.0,
    }  # fmt: skip
    assert timeline.overhead_seconds == pytest.approx(2.5) and timeline.total_seconds == pytest.approx(12.0)


def test_what_a_switch_takes_by_turns_has_a_name_of_its_own():
    clock = Clock()
    timeline = Timeline(clock=clock)
    for name, verb, seconds in (
        ("generator-0", "suspend", 1.0),
        ("trainer", "resume", 2.0),
        ("trainer", "forward", 4.0),
    ):
        with timeline.span(name, verb):
            clock.now += seconds
    window = timeline.window()
    assert window["time/switch"] == 3.0 and window["time/forward"] == 4.0 and "time/other" not in window


def test_a_pause_leaves_out_itself_and_nothing_before_it():
    """As an evaluation, before which a checkpoint was saved."""
    clock = Clock()
    timeline = Timeline(clock=clock)
    with timeline.span("trainer", "save_checkpoint"):
        clock.now = 3.0
    began = clock.now = 4.0
    with timeline.span("generator-0", "sample"):
        clock.now = 64.0
    timeline.skip(began)
    with timeline.span("trainer", "forward_backward"):
        clock.now = 66.0
    assert timeline.window() == {
        "time/step": 6.0, "time/controller": 1.0, "time/checkpoint": 3.0, "time/train": 2.0,
        "idle/trainer": 1.0, "idle/generator-0": 6.0,
    }  # fmt: skip
    assert timeline.window()["time/step"] == 0.0


def test_what_is_under_way_over_a_pause_counts_but_for_it():
    """A process that starts around an evaluation, and one that is called in it."""
    clock = Clock()
    timeline = Timeline(clock=clock)
    clock.now = 5.0
    with timeline.starting("generator-0"):
        clock.now = 6.0
        with timeline.span("reward-0", "score"):
            clock.now = 50.0
            with timeline.span("generator-1", "sample"):
                clock.now = 106.0
                timeline.skip(6.0)
                clock.now = 107.0
    clock.now = 108.0
    window = timeline.window()
    assert {name: window[name] for name in ("time/step", "time/start", "time/generate", "time/reward")} == {
        "time/step": 8.0, "time/start": 2.0, "time/generate": 1.0, "time/reward": 1.0,
    }  # fmt: skip


def test_the_time_in_which_processes_start_is_not_the_controllers():
    """One starts from before the window until the middle of it, another until after its end."""
    clock = Clock()
    timeline = Timeline(clock=clock)
    with timeline.starting("generator-0"):
        clock.now = 10.0
        timeline.skip()
        clock.now = 14.0
    clock.now = 15.0  # nobody works
    with timeline.span("trainer", "forward_backward"), timeline.starting("generator-1"):
        clock.now = 17.0
        first = timeline.window()
        clock.now = 18.0
    clock.now = 20.0
    assert first == {
        "time/step": 7.0, "time/start": 6.0, "time/train": 2.0, "time/controller": 1.0, "idle/trainer": 5.0,
    }  # fmt: skip
    second = timeline.window()
    assert second["time/start"] == 1.0 and second["time/controller"] == 2.0
    assert "time/start" not in timeline.window()


def test_a_host_is_idle_while_nobody_on_it_works():
    """The trainer is on two, then on the first alone. Of host 2 nothing was asked, as where it has not joined."""
    clock = Clock()
    timeline = Timeline(
        clock=clock, hosts={"trainer": {0, 1}, "generator-0": {1}, "reward-0": {0}, "generator-1": {2}}
    )
    with timeline.span("generator-0", "sample"):
        clock.now = 3.0
        with timeline.span("reward-0", "score"):
            clock.now = 4.0
    with timeline.span("trainer", "forward_backward"):
        clock.now = 6.0
    clock.now = 10.0
    window = timeline.window()
    assert {n: v for n, v in window.items() if n.startswith("idle/host")} == {
        "idle/host-0": 7.0, "idle/host-1": 4.0,
    }  # fmt: skip
    assert window["time/controller"] == 4.0 and "idle/generator-1" not in window
    timeline.move("trainer", {0})
    with timeline.span("trainer", "forward_backward"):
        clock.now = 11.0
    window = timeline.window()
    assert window["idle/host-0"] == 0.0 and window["idle/host-1"] == 1.0


def test_time_between_steps_is_skipped():
    clock = Clock()
    timeline = Timeline(clock=clock)
    clock.now = 100.0
    timeline.skip()
    clock.now = 101.0
    assert timeline.window()["time/step"] == pytest.approx(1.0)


@pytest.mark.parametrize("close", [Timeline.window, Timeline.skip])
def test_a_run_of_many_steps_keeps_no_call_of_those_behind_it(close):
    timeline = Timeline(clock=Clock())

    def a_step():
        for _ in range(1000):
            with timeline.span("generator-0", "sample"):
                pass
        close(timeline)

    a_step()
    kept, _ = traced_memory(lambda: [a_step() for _ in range(5)])
    assert kept < 50_000  # holds: meaning, five thousand spans take ten times as much


def test_the_trace_is_json_with_a_row_for_each_call_that_overlaps(tmp_path):
    clock = Clock()
    timeline = Timeline(with_trace=True, clock=clock)
    with timeline.span("generator-0", "sample"), timeline.span("generator-0", "sample"):
        clock.now = 0.25
    file = TraceFile(tmp_path)
    file.write(timeline.trace.take())
    file.close()
    assert timeline.trace.take() == ""
    events = [e for e in json.loads((tmp_path / "trace.json").read_text()) if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events] == [
        ("sample", 0.0, 250000.0, 0),
        ("sample", 0.0, 250000.0, 1),
    ]


def test_each_call_before_a_pause_keeps_its_own_seconds():
    """The first began in the middle of the window, the second ended in the pause."""
    clock = Clock()
    timeline = Timeline(clock=clock)
    clock.now = 1.0
    with timeline.span("trainer", "save_checkpoint"):
        clock.now = 3.0
    with timeline.span("reward-0", "score"):
        clock.now = 10.0
    clock.now = 64.0
    timeline.skip(4.0)
    clock.now = 65.0
    assert timeline.window() == {
        "time/step": 5.0, "time/checkpoint": 2.0, "time/reward": 1.0, "time/controller": 2.0,
        "idle/trainer": 3.0, "idle/reward-0": 4.0,
    }  # fmt: skip


def test_the_longest_wait_comes_first_and_is_that_of_its_first_call():
    clock = Clock()
    timeline = Timeline(clock=clock)
    with timeline.span("generator-0", "sample"):
        clock.now = 3.0
        with timeline.starting("trainer"):
            clock.now = 5.0
            with timeline.span("generator-0", "sample"):
                clock.now = 20.0
                waits = timeline.waits()
    assert waits == ["generator-0 to sample (2 calls, 20 s)", "trainer to start (17 s)"]


def test_calls_to_an_actor_one_after_the_other_are_in_one_row_under_its_name(tmp_path):
    clock = Clock()
    clock.now = 100.0
    timeline = Timeline(with_trace=True, clock=clock)
    for lane in ("trainer", "generator-0", "trainer", "trainer"):
        with timeline.span(lane, "forward"):
            clock.now += 0.5
    file = TraceFile(tmp_path)
    file.write(timeline.trace.take())
    file.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    lanes = [(e["args"]["name"], e["pid"]) for e in events if e["name"] == "process_name"]
    assert sorted(name for name, _ in lanes) == ["generator-0", "trainer"]
    names = {pid: name for name, pid in lanes}
    calls = [(names[e["pid"]], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert calls == [
        ("trainer", 0, 0.0, 500000.0),
        ("generator-0", 0, 500000.0, 500000.0),
        ("trainer", 0, 1000000.0, 500000.0),
        ("trainer", 0, 1500000.0, 500000.0),
    ]
