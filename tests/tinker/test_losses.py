"""A client's settings of a loss, against what the loss refuses."""

import math

import pytest

from rl.loss.clip import Clip
from rl.loss.dro import DRO
from rl.tinker.backend import UserError
from rl.tinker.losses import make_loss


def test_what_a_loss_refuses_is_an_error_of_the_clients():
    with pytest.raises(UserError, match=r"^dro cannot be computed: DRO.beta=-1 must be at least 0$"):
        make_loss("dro", {"beta": -1})
    with pytest.raises(UserError, match=r"^ppo cannot be computed: Clip.high=inf must be finite$"):
        make_loss("ppo", {"clip_high_threshold": math.inf})
    assert make_loss("dro", {"beta": 0}) == DRO(beta=0)
    assert make_loss("ppo", {"clip_low_threshold": 0, "clip_high_threshold": 1}) == Clip(low=1, high=0)
