"""Learning-rate schedules against torch's own, and by hand."""

# holds: exact

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from configs.quickstart import quickstart
from rl.config import WarmupConfig
from rl.config.learning import LRSchedule
from rl.controller import stages
from rl.controller.schedule import SaveClock, Schedule
from tests.controller.fakes import FakeEngine, run_fakes


def of(kind, num_steps, **settings):
    return [LRSchedule(kind, num_steps, **settings)(step) for step in range(1, num_steps + 1)]


def test_constant_after_a_linear_rise():
    assert of("constant", 5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert of("constant", 2) == [1.0, 1.0]
    assert of("constant", 2, warmup_steps=4) == [0.25, 0.5]


def test_linear_and_cosine_are_torchs():
    parameter = torch.nn.Parameter(torch.zeros(1))
    for kind, make in (
        ("linear", lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=20)),
        ("cosine", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.1)),
    ):
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        theirs, scheduler = [], make(optimizer)
        for _ in range(20):
            theirs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert of(kind, 20, min_ratio=0.1) == pytest.approx(theirs, abs=1e-6)
        assert of(kind, 23, warmup_steps=3, min_ratio=0.1)[3:] == pytest.approx(theirs, abs=1e-6)


def test_warmup_stable_decay():
    shares = of("wsd", 10, warmup_steps=2, decay_ratio=0.4)
    assert shares == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_no_step_is_without_a_learning_rate():
    for kind in ("linear", "cosine", "wsd"):
        assert min(of(kind, 7)) > 0


def saved_after(step_seconds, minutes=10.0, save_every=0, evaluation=0.0):
    """Seconds from the beginning to each checkpoint that is not the last step's. evaluation: seconds of each, which
    follows what saves by steps."""
    now, saves = 0.0, []
    clock = SaveClock(minutes, now=lambda: now)
    schedule = Schedule(1, len(step_seconds), 1000, save_every=save_every, save_clock=clock)
    for step, seconds in enumerate(step_seconds, 1):
        clock.begin()
        now += seconds
        if schedule.saves(step) and step < schedule.last:
            saves.append(now)
            clock.saved()
        now += evaluation if save_every and step % save_every == 0 else 0.0
    return saves


def test_an_evaluation_is_no_step():
    """Of 400 s after every 20th step of 10 s."""
    assert saved_after([10] * 100, save_every=20, evaluation=400) == [200, 800, 1400, 2000]


def test_what_waits_for_an_evaluation_is_saved_before_it():
    """Steps of 270 s, and after each an evaluation of 480 s: with the next step 12.5 minutes."""
    now = 0.0
    clock = SaveClock(10.0, now=lambda: now)
    schedule = Schedule(1, 100, 1, save_clock=clock)
    lost = []
    for step in range(1, 6):
        clock.begin()
        now += 270
        if schedule.saves(step):
            clock.saved()
        lost.append(now - clock._saved)
        now += 480
        clock.evaluated(480)
    assert lost == [270, 0, 0, 0, 0]
    beside = replace(schedule, evaluate_beside=True)
    clock.saved()
    clock.begin()
    now += 270
    assert schedule.saves(7) and not beside.saves(7)


def test_each_step_may_save_and_refresh_and_none_does_unless_asked():
    each, none = Schedule(1, 9, 20, save_every=1, refresh_every=1), Schedule(1, 9, 20)
    for step in range(1, 9):
        assert each.saves(step) and each.refreshes(step)
        assert not none.saves(step) and not none.refreshes(step)


def test_the_newest_step_that_an_evaluation_is_of():
    schedule = Schedule(1, 47, 20)
    steps = (0, 1, 19, 20, 21, 39, 40, 46, 47)
    assert [schedule.newest_evaluated(step) for step in steps] == [0, 0, 0, 20, 20, 20, 40, 40, 47]


@pytest.mark.parametrize("seconds", [1, 7, 61, 200, 299, 300, 301, 599, 600, 601, 5000])
@pytest.mark.parametrize("save_every", [0, 3, 20])
def test_at_most_ten_minutes_are_lost_but_for_a_longer_step_and_no_save_comes_too_early(seconds, save_every):
    times = [seconds] * (4000 // seconds + 5)
    saves = [0, *saved_after(times, save_every=save_every), sum(times)]
    gaps = [later - earlier for earlier, later in pairwise(saves)]
    assert max(gaps) <= max(600, seconds)
    if not save_every:
        assert all(gap + seconds > 600 for gap in gaps[:-1])


def test_without_minutes_or_where_steps_come_first_nothing_is_saved_by_time():
    assert saved_after([100] * 50, minutes=0) == []
    assert saved_after([1] * 50, save_every=20) == [20, 40]
    assert saved_after([0.6] * 100) == []  # the quickstart's


def test_a_warm_up_is_not_lost_either_and_its_time_is_no_step_s():
    now = 0.0
    clock = SaveClock(10, now=lambda: now)
    now = 500.0  # the warm-up
    clock.begin()
    due = []
    for _ in range(4):
        clock.begin()
        now += 40
        due.append(clock.is_due())
    assert due == [False, True, True, True]


def test_rates_of_each_step_worked_by_hand():
    def rates(*arguments, **settings):
        schedule = LRSchedule(*arguments, **settings)
        return [round(schedule(step), 6) for step in range(1, schedule.num_steps + 1)]

    assert rates("wsd", 10) == [1.0] * 9 + [0.5]  # it goes down over the last fifth
    assert rates("wsd", 10, decay_ratio=0.4) == [1.0] * 7 + [0.75, 0.5, 0.25]
    assert rates("linear", 5) == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates("linear", 4, min_ratio=0.5) == [1.0, 0.875, 0.75, 0.625]
    assert rates("linear", 4, 2) == [0.5, 1.0, 1.0, 0.5]
    assert rates("cosine", 4) == [1.0, 0.853553, 0.5, 0.146447]
    assert rates("constant", 4, 8) == [0.125, 0.25, 0.375, 0.5]
    assert rates("linear", 4, 8) == [0.5, 1.0, 1.0, 0.5]  # at most half of the steps


def test_a_run_saves_by_time_and_keeps_the_newest(tmp_path, monkeypatch):
    """Steps of three minutes, beside a checkpoint at every fifth."""
    now = 0.0

    async def optim_step(engine, params, adapter=None):
        nonlocal now
        now += 180
        engine.updates += 1
        return {"grad_norm": 1.0}

    monkeypatch.setattr(FakeEngine, "optim_step", optim_step)
    monkeypatch.setattr(stages, "SaveClock", partial(SaveClock, now=lambda: now))
    config = replace(
        quickstart(), warmup=WarmupConfig(), steps=14, prompts_per_step=2, group_size=2, save_every=5, eval_every=99
    )  # fmt: skip
    calls, _ = run_fakes(config, tmp_path)
    assert [call[2] for call in calls if call[1] == "save_checkpoint"] == [
        "step-3", "step-5", "step-8", "step-10", "step-13", "step-14",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-13", "step-14"]


def test_before_the_first_evaluation_none_is_waited_for():
    clock = iter([0.0, 29.8, 30.1])
    saves = SaveClock(1.0, clock.__next__)
    assert not saves.is_due(evaluates=True)  # 29.8 s of work, and a step as long
    assert saves.is_due(evaluates=True)
