"""A generator that samples from another policy than the one that learns: the run ends, and says where they differ."""

import asyncio
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from configs.quickstart import quickstart
from rl.batching import segments_sample
from rl.config import TrainerConfig, WarmupConfig
from rl.config.learning import learning_of
from rl.config.validate import validate
from rl.controller.parity import STEPS, Parity, PolicyMismatch, are_of_version, explain
from rl.envs.sort_letters import SortLetters
from rl.errors import RunError
from rl.observability.watches import ParityWatch
from rl.types import Group, Problem, Rollout, Score, Segment, StopReason, VersionRange
from tests.controller import fakes


def config(**changes):
    base = replace(
        quickstart(), env=SortLetters(num_eval=2), warmup=WarmupConfig(), steps=14, prompts_per_step=4, group_size=4, eval_every=20,
    )  # fmt: skip
    return replace(base, **changes)


@pytest.fixture
def gaps(monkeypatch):
    """Step -> the mean difference that the fake trainer measures; 0 where it is not named."""
    gaps: dict[int, float] = {}
    measured = fakes.FakeEngine.forward_backward

    async def forward_backward(self, batch, loss, adapter=None):
        totals = await measured(self, batch, loss, adapter)
        step = sum(call[:2] == ("trainer", "step") for call in self.calls) + 1
        return totals | {"logprob_diff:sum": gaps.get(step, 0.0) * totals["tokens:sum"]}

    monkeypatch.setattr(fakes.FakeEngine, "forward_backward", forward_backward)
    return gaps


def num_updates(calls):
    return sum(call[:2] == ("trainer", "step") for call in calls)


def run(tmp_path, **changes):
    """What was asked of the actors, what was recorded, and the error that ended the run."""
    actors, calls = fakes.fake_actors(config(**changes), tmp_path)
    recorder = fakes.QuietRecorder(tmp_path)
    settings = config(**changes)
    tokenizer = fakes.HFTokenizer(settings.model.materialize(tmp_path))
    try:
        fakes.asyncio.run(
            fakes.RunStages(learning_of(settings), settings.resume, actors, tokenizer, recorder).run()
        )
    except RunError as error:
        return calls, recorder, str(error)
    return calls, recorder, ""


def test_a_run_ends_before_its_first_update_where_the_generator_is_another_policy(tmp_path, gaps):
    gaps[1] = 3.9
    calls, recorder, error = run(tmp_path)
    assert num_updates(calls) == 0 and not recorder.steps
    assert error.startswith("step 1: the generator's logprobs differ from the trainer's by 3.9 nats a token")
    assert "over max_logprob_diff=0.003" in error


def test_the_steps_before_are_saved_as_they_were(tmp_path, gaps):
    """The policy has not learned from what another sampled: nobody has to do those steps again."""
    gaps.update(dict.fromkeys(range(3, 13), 0.1))
    calls, recorder, error = run(tmp_path, save_every=20)
    assert num_updates(calls) == 11 and list(recorder.steps) == [*range(1, 12)] and error
    record = json.loads((tmp_path / "checkpoints" / "step-11" / "record.json").read_text())
    assert record["state"]["parity"]["num_over"] == 9 and record["state"]["step"] == 11


@pytest.mark.parametrize(
    ("gap", "limit", "ends"),
    [(2.9e-3, 0.0, False), (3.1e-3, 0.0, True), (3.1e-3, 0.01, False), (1.1e-2, 0.01, True)],
)
def test_the_limit_is_the_setting_or_the_dtypes(tmp_path, gaps, gap, limit, ends):
    gaps[1] = gap
    calls, _, error = run(tmp_path, steps=2, max_logprob_diff=limit)
    assert bool(error) is ends and num_updates(calls) == (0 if ends else 2)


def test_later_it_warns_and_ends_where_it_lasts(tmp_path, gaps):
    gaps |= dict.fromkeys(range(3, 20), 0.5)
    calls, recorder, error = run(tmp_path)
    assert num_updates(calls) == 2 + STEPS - 1 and f", for {STEPS} steps" in error
    over = [metrics.get("logprob_diff/steps_over_limit") for _, metrics in sorted(recorder.steps.items())]
    assert over == [None, None, *range(1, STEPS)]
    said = [
        bool(ParityWatch().observe({"logprob_diff/mean": 0.5} | metrics))
        for metrics in recorder.steps.values()
    ]
    assert said == [False, False, True] + [False] * (STEPS - 2)


def test_a_difference_that_passes_is_forgotten(tmp_path, gaps):
    gaps |= {step: 0.5 for step in range(2, 15) if step != 8}
    _, recorder, error = run(tmp_path)
    assert not error and len(recorder.steps) == 14
    assert recorder.steps[14]["logprob_diff/steps_over_limit"] == 6


def test_what_older_versions_sampled_is_not_held_against_the_generator(tmp_path, gaps):
    """An asynchronous run: another policy sampled it, and differs by what was learned since."""
    gaps |= dict.fromkeys(range(2, 15), 0.5)
    _, recorder, error = run(tmp_path, max_offpolicy_steps=2)
    assert not error and len(recorder.steps) == 14
    assert max(metrics["offpolicy/max"] for metrics in recorder.steps.values()) > 0


def test_no_step_without_a_token_counts():
    parity = Parity(0.1)
    parity.check(math.nan)
    with pytest.raises(PolicyMismatch):  # this is the first
        parity.check(0.2)


def test_groups_of_one_version():
    def sampled(*versions):
        segments = (Segment([1], False, [0.0]), Segment([2], True, [-1.0]))
        made = [
            Rollout(Problem("1", "q"), segments, "", StopReason.STOP, v and VersionRange(v, v))
            for v in versions
        ]
        return Group(0, tuple(made), (Score(0.0),) * len(made))

    assert are_of_version([sampled(3, 3), sampled(3)], 3)
    assert not are_of_version([sampled(3, 2)], 3) and not are_of_version([], 3)
    assert are_of_version([sampled(None), sampled(3)], 3)


def test_limits_by_dtype_and_what_has_none():
    def limit(dtype="float32", asked=0.0, **trainer):
        settings = config(trainer=TrainerConfig(**trainer), max_logprob_diff=asked)
        return learning_of(settings, dtype).max_logprob_diff

    assert limit() == 3e-3 and limit("bfloat16") == 0.1
    assert limit(float8=True) == limit(dropout=True, engine="hf") == math.inf
    assert limit(float8=True, asked=0.5) == 0.5


def test_a_limit_without_rollouts_has_no_effect(tmp_path):
    settings = config(data="demonstrations", loss=fakes_cross_entropy(), max_logprob_diff=0.1)
    assert any(
        "max_logprob_diff=0.1 has no effect with data=demonstrations" in line for line in validate(settings)
    )


def fakes_cross_entropy():
    from rl.loss.cross_entropy import CrossEntropy

    return CrossEntropy()


def explained(apart, limit, length=40):
    """apart: position [T] -> the trainer's logprobs less the generator's."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(4):
        logprobs = (-1.5 + rng.normal(0, 0.02, length)).tolist()
        segments = [Segment([1, 2], False, [0.0, 0.0]), Segment([3] * length, True, logprobs)]
        samples.append(segments_sample(segments))

    class Engine:
        async def forward_samples(self, samples, adapter):
            off = [apart(np.arange(length + 2), rng) for _ in samples]
            return [
                np.where(s.target_mask, s.generator_logprobs + o, 0)
                for s, o in zip(samples, off, strict=True)
            ]

    return asyncio.run(explain(Engine(), None, samples, limit))


@pytest.mark.parametrize(
    ("apart", "limit", "expected"),
    [
        (lambda at, rng: 1.0 * (at >= 0), 3e-3, "wherever tokens were sampled, from position 2 on"),
        (lambda at, rng: 0.05 * (at >= 20), 3e-3, "tokens at positions below 20 agree"),
        # Rounding in bfloat16: single tokens are over the limit of the mean everywhere.
        (lambda at, rng: rng.normal(0, 0.08, len(at)) + 1.0 * (at >= 20), 0.1, "positions below 20 agree"),
        (lambda at, rng: rng.normal(0, 0.3, len(at)), 0.1, "wherever tokens were sampled, from position"),
        (lambda at, rng: 0.0 * at, 3e-3, "computed again without a gradient they agree"),
        (lambda at, rng: 0.05 * (at >= 3), 3e-3, "wherever tokens were sampled"),  # too few before
    ],
)
def test_the_error_says_where_the_two_begin_to_differ(apart, limit, expected):
    assert expected in explained(apart, limit)


def test_tokens_that_are_certain_prove_nothing():
    """A template's, which any weights agree on; the others begin at position 20 and all differ."""
    rng = np.random.default_rng(0)
    certain, guessed = np.full(18, -1e-4), -1.5 + rng.normal(0, 0.02, 22)
    segments = [Segment([1, 2], False, [0.0, 0.0]), Segment([3] * 40, True, [*certain, *guessed])]
    samples = [segments_sample(segments) for _ in range(4)]

    class Engine:
        async def forward_samples(self, samples, adapter):
            off = np.where(np.arange(42) < 20, 0.0, 0.5)
            return [np.where(s.target_mask, s.generator_logprobs + off, 0) for s in samples]

    assert "wherever tokens were sampled" in asyncio.run(explain(Engine(), None, samples, 3e-3))
