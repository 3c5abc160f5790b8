"""A client's settings and inputs of a loss, against what the loss refuses; and what `forward` says of the loss."""

# holds: exact, worked by hand in float32

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl.loss.base import TokenInputs
from rl.loss.clip import Clip
from rl.loss.dro import DRO
from rl.tinker.actors_backend import ActorsBackend
from rl.tinker.backend import Datum, UserError
from rl.tinker.losses import (
    CLIP,
    MAY_CARRY,
    NEEDS,
    NOT_OFFERED,
    check,
    make_loss,
    measure,
    to_logprobs,
    to_samples,
)

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


@pytest.mark.parametrize("mask", [None, [0.0, 0.0, 2.0, 1.0]])
def test_gspos_ratio_is_of_the_sampled_tokens(mask):
    """A prompt's tokens have logprobs and advantages of 0, as the cookbook builds data."""
    inputs = {"logprobs": [0, 0, -1, -2], "advantages": [0, 0, 1, 1], "sequence_ratio_mask": mask}
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items() if values is not None}
    (sample,) = to_samples([Datum(np.arange(4), np.arange(1, 5), arrays)], "gspo")
    assert sample.loss_inputs["sequence_ratio_mask"].tolist()[-4:] == [0, 0, 1, 1]


def test_forward_checks_the_setting_as_forward_backward_does():
    backend = ActorsBackend(SimpleNamespace(trainer=None), "base", 64, 128)
    with pytest.raises(UserError, match="no setting 'clip'"):
        asyncio.run(backend.forward_backward("m", [policy_datum()], "ppo", {"clip": 1.0}, True))


@pytest.mark.parametrize(
    ("loss", "settings", "ratio", "advantage", "expected"),
    [
        ("ppo", {}, 8.0, 1.0, -1.2),
        ("ppo", {}, 0.5, -1.0, 0.8),
        ("ppo", {"clip_high_threshold": 3.0}, 8.0, 1.0, -3.0),
        ("ppo", {"clip_low_threshold": 0.6}, 0.5, -1.0, 0.6),
        ("gspo", {}, 8.0, 1.0, -(1 + 4e-4)),
        ("gspo", {"clip_high_threshold": 3.0}, 8.0, 1.0, -3.0),
        ("gspo", {"clip_low_threshold": 0.6}, 0.5, -1.0, 0.6),
        ("cispo", {}, 8.0, 1.0, -4.0 * math.log(8.0)),  # the ratio is cut, the logprob learns
        ("cispo", {}, 0.5, 1.0, -0.5 * math.log(0.5)),
        ("cispo", {"clip_high_threshold": 3.0}, 8.0, 1.0, -3.0 * math.log(8.0)),
        ("cispo", {"clip_low_threshold": 0.6}, 0.5, 1.0, -0.6 * math.log(0.5)),
        ("importance_sampling", {}, 8.0, 1.0, -8.0),
        ("dro", {}, 8.0, 1.0, -(math.log(8.0) - 0.05 / 2 * math.log(8.0) ** 2)),
        ("dro", {"beta": 1.0}, 8.0, 1.0, -(math.log(8.0) - 1 / 2 * math.log(8.0) ** 2)),
    ],
)
def test_a_ratio_far_from_one_costs_what_tinkers_formula_says(loss, settings, ratio, advantage, expected):
    """Of one token, whose logprob was 0 where it was sampled."""
    (sample,) = to_samples(
        [Datum(np.array([1]), np.array([2]), {"logprobs": np.zeros(1, np.float32), "advantages": np.full(1, advantage, np.float32)})],
        loss,
    )  # fmt: skip
    metrics = measure([sample], [np.array([0, math.log(ratio)], np.float32)], make_loss(loss, settings))
    assert metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.0), (1.0, 4.0)])
def test_thresholds_at_the_edge_are_taken(low, high):
    for loss in ("ppo", "cispo", "gspo"):
        make_loss(loss, {"clip_low_threshold": low, "clip_high_threshold": high})


@pytest.mark.parametrize(("low", "high"), [(-0.1, 2.0), (1.1, 2.0), (0.5, 0.9)])
def test_thresholds_that_do_not_hold_1_are_refused(low, high):
    for loss in ("ppo", "cispo", "gspo"):
        with pytest.raises(UserError, match="does not hold 1"):
            make_loss(loss, {"clip_low_threshold": low, "clip_high_threshold": high})


def plain(num_tokens=2, first=1, last=2, **inputs):
    tokens = np.full(num_tokens, 3)
    tokens[:1], targets = first, np.full(num_tokens, last)
    return Datum(tokens, targets, {name: np.array(v, np.float32) for name, v in inputs.items()})


@pytest.mark.parametrize(
    ("accepted", "refused", "match"),
    [
        (plain(1), plain(0), r"datum 1: 0 input tokens, of which there have to be 1 to 7"),
        (plain(7), plain(8), r"datum 1: 8 input tokens"),
        (plain(first=0), plain(first=-1), r"model_input has a token outside the vocabulary of 10"),
        (plain(first=9), plain(first=10), r"model_input has a token outside the vocabulary of 10"),
        (plain(last=0), plain(last=-1), r"target_tokens has a token outside the vocabulary of 10"),
        (plain(last=9), plain(last=10), r"target_tokens has a token outside the vocabulary of 10"),
        (plain(weights=[1, 1]), plain(advantages=[1, 1]), r"does not read \['advantages'\]; leave them out"),
        (plain(weights=[1, 0]), plain(weights=[1, math.inf]), r"weights is not finite"),
        (plain(weights=[1, 0]), plain(weights=[1]), r"weights has shape \[1\] and target_tokens \[2\]"),
        (
            Datum(np.array([1, 2]), np.ones((2, 3), int), {}),
            Datum(np.array([1, 2]), np.ones((2, 3, 1), int), {}),
            r"target_tokens of shape \[2, 3, 1\]",
        ),
        (plain(), Datum(np.array([1, 2]), np.ones((2, 0), int), {}), r"target_tokens of shape \[2, 0\]"),
        (plain(), Datum(np.array([1, 2]), np.ones(3, int), {}), r"target_tokens of shape \[3\] for 2 input"),
    ],
)
def test_the_last_that_is_taken_and_the_first_that_is_not(accepted, refused, match):
    """In a context of 8 tokens and a vocabulary of 10; the second datum is looked at as the first is."""
    check([accepted, accepted], "cross_entropy", 8, 10)
    with pytest.raises(UserError, match=match):
        check([accepted, refused], "cross_entropy", 8, 10)
    check([accepted], "cross_entropy", 8, 10)


def test_what_no_loss_can_be_made_of_is_refused():
    for name, remedy in NOT_OFFERED.items():
        with pytest.raises(UserError, match=f"^loss_fn '{name}' is not offered here: {remedy}$"):
            check([plain()], name, 8, 10)
    with pytest.raises(UserError, match="^unknown loss_fn 'mse'; use one of"):
        check([plain()], "mse", 8, 10)
    with pytest.raises(UserError, match="without data"):
        check([], "cross_entropy", 8, 10)
    with pytest.raises(UserError, match=r"ppo needs \['advantages'\]"):
        check([plain(logprobs=[0, 0])], "ppo", 8, 10)
    two = Datum(np.array([1]), np.ones((1, 2), int), {n: np.ones((1, 2)) for n in NEEDS["ppo"]})
    check([two], "importance_sampling", 8, 10)
    with pytest.raises(UserError, match="ppo takes one target for each token, not 2"):
        check([two], "ppo", 8, 10)


def test_each_column_of_targets_becomes_a_sample_with_its_own_inputs():
    columns = {"logprobs": [[-1, -2], [-3, -4], [-5, -6]], "advantages": [[1, 2], [3, 4], [5, 6]]}
    wide = Datum(
        np.array([1, 2, 3]), np.array([[2, 7], [3, 8], [4, 9]]),
        {name: np.array(values, np.float32) for name, values in columns.items()},
    )  # fmt: skip
    narrow = plain(logprobs=[-7, -8], advantages=[9, 10])
    samples = to_samples([wide, narrow], "importance_sampling")
    assert [s.id for s in samples] == ["datum 0", "datum 0", "datum 1"]
    assert [s.tokens.tolist() for s in samples] == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 3, 2]]
    assert [s.labels.tolist() for s in samples] == [[0, 2, 3, 4], [0, 7, 8, 9], [0, 2, 2]]
    assert [s.generator_logprobs.tolist() for s in samples] == [[0, -1, -3, -5], [0, -2, -4, -6], [0, -7, -8]]
    assert [s.advantages.tolist() for s in samples] == [[0, 1, 3, 5], [0, 2, 4, 6], [0, 9, 10]]
    assert all(
        s.weights.tolist() == [1] * len(s) and s.loss_mask.all() and not s.loss_inputs for s in samples
    )
    computed = [np.arange(4) + 10 * i for i in range(2)] + [np.arange(3) + 20]
    first, second = to_logprobs([wide, narrow], computed)
    assert first.tolist() == [[1, 11], [2, 12], [3, 13]] and second.tolist() == [21, 22]


def test_weights_are_those_of_the_datum():
    (sample,) = to_samples([plain(weights=[0.5, 2.0])], "cross_entropy")
    assert sample.weights.tolist() == [0, 0.5, 2.0] and sample.generator_logprobs.tolist() == [0, 0, 0]


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_a_token_may_have_thresholds_of_0_and_1(loss):
    check([policy_datum(clip_low_threshold=[0.0, 1.0], clip_high_threshold=[1.0, 1.0])], loss, 64, 128)
    with pytest.raises(UserError, match="clip_low_threshold has 1.5"):
        check([policy_datum(clip_low_threshold=[0.0, 1.5])], loss, 64, 128)


def test_gspos_gradient_is_of_each_token():
    """Of tokens with other advantages, each has its own; the sequence's ratio would give both the mean."""
    logprobs, ones = torch.zeros(2, requires_grad=True), torch.ones(2)
    inputs = TokenInputs(torch.zeros(2), torch.tensor([1.0, 3.0]), ones, torch.zeros(2, dtype=torch.int64))
    make_loss("gspo", {})(logprobs, inputs).loss.backward()
    assert logprobs.grad.tolist() == [-1.0, -3.0]


def test_a_datum_of_one_token_has_its_logprob():
    (only,) = to_logprobs([plain(1)], [np.array([0.0, -3.0])])
    assert only.tolist() == [-3.0]
