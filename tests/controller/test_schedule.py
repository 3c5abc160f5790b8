"""Learning-rate schedules against torch's own, and by hand."""

# holds: exact

import pytest
import torch

from rl.controller.schedule import LRSchedule


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
