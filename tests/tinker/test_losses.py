"""A client's settings and inputs of a loss, against what the loss refuses; and what `forward` says of the loss."""

# holds: exact, worked by hand in float32

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest

from rl.loss.clip import Clip
from rl.loss.dro import DRO
from rl.tinker.actors_backend import ActorsBackend
from rl.tinker.backend import Datum, UserError
from rl.tinker.losses import CLIP, MAY_CARRY, NEEDS, check, make_loss, to_samples

HALF = math.log(0.5)


def datum(**inputs):
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    return Datum(np.array([1, 2]), np.array([2, 3]), arrays)


def policy_datum(**inputs):
    return datum(**{"logprobs": [HALF, HALF], "advantages": [1.0, -1.0], **inputs})


def test_what_a_loss_refuses_is_an_error_of_the_clients():
    with pytest.raises(UserError, match=r"^dro cannot be computed: DRO.beta=-1 must be at least 0$"):
        make_loss("dro", {"beta": -1})
    with pytest.raises(UserError, match=r"^ppo cannot be computed: Clip.high=inf must be finite$"):
        make_loss("ppo", {"clip_high_threshold": math.inf})
    assert make_loss("dro", {"beta": 0}) == DRO(beta=0)
    assert make_loss("ppo", {"clip_low_threshold": 0, "clip_high_threshold": 1}) == Clip(low=1, high=0)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_thresholds_of_each_token_reach_the_loss(loss):
    one = policy_datum(clip_low_threshold=[0.5, 0.7], clip_high_threshold=[1.0, 2.0])
    check([one], loss, 64, 128)
    (sample,) = to_samples([one], loss)
    assert {name: sample.loss_inputs[name][1:].tolist() for name in CLIP} == {
        "clip_low_threshold": pytest.approx([0.5, 0.7]),
        "clip_high_threshold": [1.0, 2.0],
    }
    for inputs, match in [
        ({"clip_low_threshold": [0.5, 1.5]}, r"datum 0: clip_low_threshold has 1.5; each has to be 0 to 1"),
        ({"clip_low_threshold": [0.5, -0.5]}, r"clip_low_threshold has -0.5; each has to be 0 to 1"),
        ({"clip_high_threshold": [0.5, 1.5]}, r"clip_high_threshold has 0.5; each has to be at least 1"),
        ({"clip_high_threshold": [math.nan, 1.5]}, "clip_high_threshold is not finite"),
        ({"clip_high_threshold": [1.5]}, r"clip_high_threshold has shape \[1\]"),
    ]:
        with pytest.raises(UserError, match=match):
            check([policy_datum(**inputs)], loss, 64, 128)


@pytest.mark.parametrize(("loss", "name"), [(loss, name) for loss in MAY_CARRY for name in MAY_CARRY[loss]])
def test_what_a_datum_may_carry_all_or_none_of_them_carry(loss, name):
    """Batches keep only what every sample has: an input of some would be dropped in silence."""
    carrying = policy_datum(**{name: [1.0, 1.0]})
    check([carrying, carrying], loss, 64, 128)
    with pytest.raises(UserError, match=f"datum 1 has no {name}, which datum 0 has; give it to all"):
        check([carrying, policy_datum()], loss, 64, 128)
    with pytest.raises(UserError, match=f"datum 0 has no {name}, which datum 1 has; give it to all"):
        check([policy_datum(), carrying], loss, 64, 128)


@pytest.mark.parametrize("loss", NEEDS)
def test_forward_measures_what_forward_backward_does(loss):
    """Two targets whose logprobs are log 0.25: ratios of 0.5 against the sampler's log 0.5."""

    class Trainer:
        async def forward_samples(self, samples, adapter):
            return [np.full(len(sample), 2 * HALF, np.float32) for sample in samples]

    backend = ActorsBackend(SimpleNamespace(trainer=Trainer()), "base", 64, 128)
    one = datum(weights=[1.0, 0.5]) if loss == "cross_entropy" else policy_datum()
    learned = asyncio.run(backend.forward_backward("m", [one], loss, {}, forward_only=True))
    assert learned.logprobs[0].tolist() == pytest.approx([2 * HALF] * 2)
    clips = loss in ("ppo", "gspo")
    expected = {
        "cross_entropy": -1.5 * 2 * HALF,
        "importance_sampling": 0.0,  # -(0.5 * 1 - 0.5 * 1)
        "ppo": -(0.5 - 0.8),
        "gspo": -(0.5 - (1 - 3e-4)),
        "cispo": 0.0,
        "dro": 2 * 0.05 / 2 * HALF**2,  # beta / 2 of both; the advantages' terms cancel
    }
    assert learned.metrics.pop("loss:sum") == pytest.approx(expected[loss], abs=1e-6)
    named = {"clip_fraction:sum": 1.0 if clips else 0.0} if clips or loss == "cispo" else {}
    named |= {"apart_squared:sum": pytest.approx(2 * HALF**2)} if loss == "dro" else {}
    assert learned.metrics == named


def test_forward_checks_the_setting_as_forward_backward_does():
    backend = ActorsBackend(SimpleNamespace(trainer=None), "base", 64, 128)
    with pytest.raises(UserError, match="no setting 'clip'"):
        asyncio.run(backend.forward_backward("m", [policy_datum()], "ppo", {"clip": 1.0}, True))
