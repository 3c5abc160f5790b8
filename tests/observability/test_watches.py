"""What a run says once: of a policy that collapses, and not of one that learns; of prefixes that save nothing."""

import numpy as np

from rl.observability.watches import CollapseWatch, LossWatch, ParityWatch, SharingWatch


def said(entropy, signal, correct, steps=30):
    watch = CollapseWatch()
    return [
        (step, words)
        for step in range(1, steps + 1)
        if (
            words := watch.observe(
                {"entropy": entropy, "group/with_signal": signal, "reward/correct": correct}
            )
        )
    ]


def test_a_collapse_is_said_once_with_the_settings_to_look_at():
    ((step, words),) = said(entropy=0.05, signal=0.2, correct=0.47)
    assert step == 10
    assert "entropy is 0.05 nats" in words and "80% of the groups" in words and "47% of the answers" in words
    assert "entropy.target, trainer.lr, trainer.lr_schedule, group_size and resampling_rounds" in words


def test_nothing_is_said_of_a_policy_that_explores_learns_or_is_done():
    assert not said(entropy=0.3, signal=0.2, correct=0.47)
    assert not said(entropy=0.05, signal=0.6, correct=0.47)
    assert not said(entropy=0.01, signal=0.1, correct=0.97)
    assert not CollapseWatch().observe({"loss": 1.0})  # supervised: there is no reward


def test_prefixes_that_save_nothing_are_said_once():
    def said(computed):
        watch = SharingWatch()
        metrics = {"tokens/computed": computed, "tokens/computed_unshared": 100.0}
        return [step for step in range(1, 31) if watch.observe(metrics)]

    assert said(100.0) == [10] and said(99.0) == []


def test_a_loss_that_rises_is_said_once_and_one_of_any_sign_that_stays_is_not():
    def said(*losses):
        watch = LossWatch("trainer.lr")
        return [step for step, loss in enumerate(losses, 1) if watch.observe({"loss": loss})]

    assert said(1.0, 1.0, 1.0, 1.3, 1.6, 1.9, 2.2) == [6]  # over 1.25 times the best, and 0.1
    assert said(-2.0, -2.0, -2.0, -1.0, -1.0, -1.0) == [5]
    assert said(*[-2.0] * 20) == said(*[0.0] * 20) == said(*[3.0] * 20) == []
    assert said(3.0, 2.0, 1.0, 0.5) == []


def test_a_loss_that_goes_up_and_down_from_batch_to_batch_does_not_rise():
    """As DPO's, of 32 pairs whose margins no longer grow; and one that then does rise is told."""
    for seed in range(20):
        rng, watch = np.random.default_rng(seed), LossWatch("trainer.lr")
        losses = np.log1p(np.exp(-rng.normal(1.0, 1.5, (200, 32)))).mean(1)
        assert not [step for step, loss in enumerate(losses) if watch.observe({"loss": loss})]
        told = [step for step in range(10) if watch.observe({"loss": 1.0 + step})]
        assert told and told[0] <= 4


def test_a_gap_over_the_limit_is_lines_as_it_begins():
    watch = ParityWatch()
    gap = {"logprob_diff/mean": 0.5}
    lines = [watch.observe(gap | {"logprob_diff/steps_over_limit": number}) for number in (0, 1, 2, 3, 0, 1)]
    assert [bool(words) for words in lines] == [False, True, False, False, False, True]
    assert "by 0.5 nats a token" in lines[1] and "max_logprob_diff" in lines[1]
    assert watch.observe({"loss": 1.0}) is None  # of demonstrations
