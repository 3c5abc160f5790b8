"""What a step's updates hand to the engines: which samples, which denominator, which learning rate, which loss."""

# holds: exact

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rl.batching import supervised_sample
from rl.config import WarmupConfig
from rl.controller.parity import Parity
from rl.controller.training_batch import TrainingBatch, TrainingGroup
from rl.controller.update import StepFailed, denominator, learn, minibatches, stream
from rl.controller.updaters import Updater
from rl.errors import NotFinite, RunError
from rl.loss.advantages.gae import GAE
from rl.models.engine_config import EngineConfig
from rl.types import Group, OptimParams, Problem, Rollout, Score, Segment, StopReason, VersionRange
from tests.controller.fakes import FakeEngine, run_fakes
from tests.controller.test_update import config

GROUPS = [
    TrainingGroup([supervised_sample([1], [10 + i] * (i + 1)) for _ in range(2)], 2 * (i + 1), 2)
    for i in range(6)
]
STEP, SEED = 3, 0
SUMS = [f"{name}:sum" for name in ("loss", "entropy", "ratio_outside", "error", "return", "return_squared")]


class Engine(FakeEngine):
    """`learned`: (tokens of each sample, loss, adapter) of each call; `fails`: the call that raises it."""

    def __init__(self, fails=(None, None), gap=0.0):
        super().__init__("trainer", [], EngineConfig())
        self.learned, self.stepped, self.fails, self.gap, self.units = [], [], fails, gap, []

    async def pack(self, samples, samples_per_unit=1):
        self.units.append(samples_per_unit)
        num = sum(len(sample.tokens) for sample in samples)
        return SimpleNamespace(samples=samples, num_tokens=num, num_unshared_tokens=num, num_cuts=0)

    async def forward(self, batch, adapter=None):
        return {i: np.ones(sample.loss_mask.sum(), np.float32) for i, sample in enumerate(batch.samples)}

    async def forward_backward(self, batch, loss, adapter=None):
        self.learned.append((tokens_of(batch.samples), loss, adapter))
        if len(self.learned) - 1 == self.fails[0]:
            raise self.fails[1]
        num = float(sum(sample.loss_mask.sum() for sample in batch.samples))
        sums = dict.fromkeys(SUMS, 0.0) | {"logprob_diff:max": 0.0}
        return sums | {"tokens:sum": num, "logprob_diff:sum": self.gap * num}

    async def optim_step(self, params, adapter=None):
        self.stepped.append((params, adapter))
        return {"grad_norm": 1.0}


def updater(engine, adapter=None):
    return Updater(engine, adapter, object(), OptimParams(lr=0.5), lambda step: 0.1 * step)


def group(version):
    segments = (Segment([1], False, [0.0]), Segment([2], True, [-1.0]))
    made = Rollout(Problem("1", "q"), segments, "", StopReason.STOP, VersionRange(version, version))
    return Group(0, (made,), (Score(0.0),))


def tokens_of(samples):
    return sorted(sample.tokens.tolist() for sample in samples)


def tokens(groups):
    return tokens_of([sample for group in groups for sample in group.samples])


def run(batch, policy, critic=None, parity=None, **changes):
    algorithm = config(**changes).algorithm
    return asyncio.run(learn(batch, STEP, algorithm, SEED, policy, critic, parity)), algorithm


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean"])
@pytest.mark.parametrize("adapter", [None, "policy"])
def test_each_update_has_its_own_minibatch_denominator_and_rate(agg, adapter):
    engine = Engine()
    policy = updater(engine, adapter)
    metrics, algorithm = run(TrainingBatch(GROUPS), policy, minibatches=3, epochs=2, loss_agg=agg)
    plan = minibatches(GROUPS, algorithm, SEED, STEP)
    assert [learned[0] for learned in engine.learned] == [tokens(part) for part in plan]
    assert {learned[1:] for learned in engine.learned} == {(policy.loss, adapter)}
    for (params, whose), part in zip(engine.stepped, plan, strict=True):
        assert whose == adapter and params.lr == pytest.approx(0.5 * 0.1 * STEP)
        assert params.grad_scale == pytest.approx(1 / denominator(part, algorithm))
    assert metrics["lr"] == pytest.approx(0.5 * 0.1 * STEP) and metrics["updates"] == 6


def test_a_critic_learns_from_the_same_minibatches_sample_by_sample():
    policy, critic = Engine(), Engine()
    batch = replace(TrainingBatch(GROUPS), samples_per_unit=2)
    run(batch, updater(policy), updater(critic), minibatches=2, advantages=GAE())
    assert [learned[0] for learned in critic.learned] == [learned[0] for learned in policy.learned]
    assert policy.units == [2, 2] and critic.units == [1, 1]


def test_what_was_streamed_counts_in_the_denominator_and_is_not_trained_on_again():
    engine = Engine()
    policy, algorithm = updater(engine), config().algorithm

    async def main():
        batch = TrainingBatch(GROUPS[:2], rollouts=[group(STEP - 1)])
        batch = await stream(batch, STEP, policy)
        await learn(replace(batch, groups=GROUPS[2:]), STEP, algorithm, SEED, policy, None)

    asyncio.run(main())
    assert [learned[0] for learned in engine.learned] == [tokens(GROUPS[:2]), tokens(GROUPS[2:])]
    ((params, _),) = engine.stepped
    assert params.grad_scale == pytest.approx(1 / denominator(GROUPS, algorithm))


@pytest.mark.parametrize(("version", "ends"), [(STEP - 1, True), (STEP - 2, False)])
def test_the_gap_ends_a_run_only_where_the_version_that_learns_has_sampled(version, ends):
    """Before its update. Tokens of an older version are another policy's: their gap is the policy's change."""
    engine = Engine(gap=1.0)
    batch = TrainingBatch(GROUPS, rollouts=[group(version)])
    if not ends:
        run(batch, updater(engine), parity=Parity(0.5))
        assert len(engine.stepped) == 1
        return
    with pytest.raises(RunError, match=rf"step {STEP}: the generator's logprobs differ .* by 1 nats"):
        run(batch, updater(engine), parity=Parity(0.5))
    assert not engine.stepped


def test_the_gap_is_that_of_the_first_update():
    """Later ones measure a policy that has moved."""
    engine = Engine()
    parity = Parity(0.5)

    async def moves(batch, loss, adapter=None):
        engine.gap = float(len(engine.learned))
        return await Engine.forward_backward(engine, batch, loss, adapter)

    engine.forward_backward = moves
    run(TrainingBatch(GROUPS, rollouts=[group(STEP - 1)]), updater(engine), parity=parity, minibatches=3)
    assert len(engine.stepped) == 3 and parity.num_over == 0


def test_where_the_policy_fails_the_critic_is_waited_for():
    """It would go on while the run saves, or restarts its engine."""
    policy, critic = Engine(fails=(0, NotFinite("the loss is nan", "loss"))), Engine()

    async def slowly(batch, loss, adapter=None):
        await asyncio.sleep(0.01)
        return await Engine.forward_backward(critic, batch, loss, adapter)

    critic.forward_backward = slowly
    with pytest.raises(RunError, match=f"step {STEP}, update 1 of 2 of the trainer"):
        run(TrainingBatch(GROUPS), updater(policy), updater(critic), minibatches=2, advantages=GAE())
    assert len(critic.stepped) == 2


class Failing(Engine):
    """Its loss is not finite where `fails_on` says so of the first target of each sample."""

    def __init__(self, fails_on):
        super().__init__()
        self.fails_on = fails_on

    async def forward_backward(self, batch, loss, adapter=None):
        if self.fails_on({int(sample.tokens[1]) for sample in batch.samples}):
            raise NotFinite("the loss is nan", "loss")
        return await super().forward_backward(batch, loss, adapter)


@pytest.mark.parametrize(
    ("num_samples", "samples_per_unit", "fails_on", "blamed"),
    [
        (5, 1, lambda targets: 12 in targets, "the sample is s2: look at its reward"),
        (6, 2, lambda targets: 13 in targets, "the sample is s2 with s3: look at its reward"),
        (5, 1, lambda targets: True, "every sample that was tried fails alone, s0 among them, so look at"),
        (5, 1, lambda targets: {10, 14} <= targets,
         "it takes more than one sample: none of s0 and 4 others fails alone"),
    ],
)  # fmt: skip
def test_what_a_step_failed_of_is_found_without_a_change_of_the_weights(
    num_samples, samples_per_unit, fails_on, blamed
):
    samples = [supervised_sample([1], [10 + i], id=f"s{i}") for i in range(num_samples)]
    groups = [TrainingGroup(samples, num_samples, num_samples)]
    batch = TrainingBatch(groups, samples_per_unit=samples_per_unit)
    engine = Failing(fails_on)
    with pytest.raises(StepFailed) as error:
        run(batch, updater(engine))
    assert asyncio.run(error.value.find_sample()).startswith(blamed)
    scale = 1 / denominator(batch.groups, config().algorithm)
    assert all((params.lr, params.grad_scale) == (0.0, scale) for params, _ in engine.stepped)
    assert set(engine.units) == {samples_per_unit}


def test_what_the_critic_learned_is_in_the_metrics():
    metrics, _ = run(TrainingBatch(GROUPS), updater(Engine()), updater(Engine()), advantages=GAE())
    assert (metrics["critic/grad_norm"], metrics["critic/loss"]) == (1.0, 0.0)


def test_a_warm_up_takes_means_over_its_tokens_and_leaves_a_fresh_optimizer(tmp_path):
    warmup = WarmupConfig(steps=2, batch_size=3, lr=0.5)
    calls, _ = run_fakes(config(warmup=warmup, steps=1), tmp_path)
    steps, num_tokens = [], 0
    for _, verb, *rest in calls:
        if verb == "learn":
            num_tokens += len(rest[0])
        elif verb == "step":
            steps.append((rest[0], num_tokens))
            num_tokens = 0
        elif verb == "reset_optimizer":
            break
    assert len(steps) == 2
    assert [params for params, _ in steps] == [OptimParams(0.5, 1 / num) for _, num in steps]
