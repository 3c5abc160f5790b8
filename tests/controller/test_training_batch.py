# holds: exact

import asyncio
import itertools
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from configs.quickstart import quickstart
from rl.config import CriticConfig
from rl.config.learning import learning_of
from rl.controller.member import scatter_reward
from rl.controller.rollouts import check_rewards
from rl.controller.training_batch import build_training_batch
from rl.controller.update import denominator
from rl.envs.calculator import Calculator
from rl.envs.chat.agent import AgentEnv
from rl.errors import RunError
from rl.loss.advantages.gae import GAE
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.shaping import Shaping
from rl.observability.metrics import eval_metrics, group_metrics
from rl.types import Group, Problem, Rewards, Rollout, Score, Segment, StopReason, VersionRange
from tests.controller.fakes import build


def group(*scores):
    segments = (Segment([1, 2], False, [0.0, 0.0]), Segment([3, 4, 5], True, [-1.0, -1.0, -1.0]))
    rollout = Rollout(Problem("1", "q", "a"), segments, "", StopReason.STOP, VersionRange(0, 0))
    return Group(0, (rollout,) * len(scores), tuple(s if isinstance(s, Score) else Score(s) for s in scores))


def learnt_from(groups, tmp_path):
    """The samples that learn, and the number of tokens in the mean."""
    config = quickstart()
    batch, _ = build(groups, config, tmp_path)
    return [s for g in batch.groups for s in g.samples], denominator(batch.groups, config.algorithm)


def test_samples_without_a_signal_are_left_out_but_their_tokens_count_in_the_mean(tmp_path):
    samples, num_tokens = learnt_from([group(1, 1), group(0, 1)], tmp_path)
    assert len(samples) == 2 and num_tokens == 12
    assert [round(float(s.advantages[-1]), 3) for s in samples] == [-0.707, 0.707]


def test_a_rollout_without_a_token_has_its_score_in_the_group(tmp_path):
    """An agent that never called the policy and was right: the others are no better than it."""
    full = group(1, 1)
    silent = replace(full.rollouts[0], segments=full.rollouts[0].segments[:1], versions=None)

    def advantages(silent_reward):
        scores = (*full.scores, Score(silent_reward))
        samples, _ = learnt_from([Group(0, (*full.rollouts, silent), scores)], tmp_path)
        return [round(float(s.advantages[-1]), 3) for s in samples if s.num_targets]

    assert advantages(1.0) == [0.0, 0.0]
    assert advantages(0.0) == [0.577, 0.577]


def test_a_failed_reward_leaves_its_sample_out_of_the_group(tmp_path):
    samples, num_tokens = learnt_from([group(0, Score(0.0, "ValueError"), 1)], tmp_path)
    assert len(samples) == 2 and num_tokens == 6


def test_without_any_signal_one_group_is_kept_to_measure_parity(tmp_path):
    samples, _ = learnt_from([group(1, 1), group(0, 0)], tmp_path)
    assert len(samples) == 2 and not any(s.advantages.any() for s in samples)


def test_where_every_reward_failed_nothing_is_trained_on(tmp_path):
    assert learnt_from([group(Score(0.0, "x"), Score(0.0, "x"))], tmp_path) == ([], 1)


def test_metrics_count_failures_apart_from_rewards():
    metrics = group_metrics([group(1, 0), group(1, Score(0.0, "x"))])
    assert metrics["reward/mean"] == 2 / 3 and metrics["reward/errors"] == 1
    evaluated = eval_metrics([group(1), group(0), group(Score(0.0, "x")), group(1)])
    assert (
        evaluated["eval/accuracy"] == 0.5
        and evaluated["eval/standard_error"] == 0.25
        and evaluated["eval/errors"] == 1
    )


def test_a_task_on_which_every_reward_fails_stops_the_run():
    failed = Score(0.0, "ValueError: x")
    check_rewards([group(failed, 1), group(failed, failed)])
    with pytest.raises(
        RunError, match="all 4 rewards failed, the first: ValueError: x; see logs/reward-0.log"
    ):
        check_rewards([group(failed, failed), group(failed, failed)])


def built(groups, **changes):
    return asyncio.run(build_training_batch(groups, replace(quickstart(), **changes).algorithm, {}))


def test_what_shaping_adds_is_in_the_metrics_and_in_the_advantages():
    """Responses of 3 of 4 tokens lose half of the punishment over the last 2."""
    groups, env = [group(1, 0)], replace(quickstart().env, max_new_tokens=4)
    plain = built(groups, env=env)
    shaped = built(groups, env=env, shaping=Shaping(overlong_tokens=2))
    assert plain.means.keys().isdisjoint({"reward/shaping", "kl"})
    assert shaped.means["reward/shaping"] == (-1.0, 2)


def test_a_truncated_rollout_that_is_dropped_learns_nothing_and_counts_in_its_groups_mean():
    """Of rewards 1, 1 and 0 the mean is 2/3, whichever is left out."""
    made = group(1, 1, 0)
    first, *others = made.rollouts
    cut = replace(made, rollouts=(replace(first, stop=StopReason.LENGTH), *others))
    batch = built([cut], shaping=Shaping(drop_truncated=True), advantages=GroupMean(adv_norm="none"))
    (trained,) = batch.groups
    assert [float(s.advantages[-1]) for s in trained.samples] == pytest.approx([1 / 3, -2 / 3])
    assert trained.num_sequences == 2 and trained.num_tokens == 6
    kept = built([cut], advantages=GroupMean(adv_norm="none")).groups[0]
    assert len(kept.samples) == kept.num_sequences == 3


def test_a_response_of_no_tokens_is_the_shortest_of_its_group():
    """It gains half of length_coef, the two others lose half: 1.5 against 0.5 and 0.5."""
    made = group(1, 1, 1)
    silent = replace(made.rollouts[0], segments=())
    groups = [replace(made, rollouts=(silent, *made.rollouts[1:]))]
    batch = built(groups, shaping=Shaping(length_coef=1.0), advantages=GroupMean(adv_norm="none"))
    advantages = [float(s.advantages[-1]) for s in batch.groups[0].samples if s.loss_mask.any()]
    assert advantages == pytest.approx([-1 / 3, -1 / 3])


@dataclass(frozen=True)
class Agent(AgentEnv):
    pass


def test_an_episode_may_sample_all_of_its_turns():
    """As many tokens count for the punishment of long ones, and for loss_agg=constant, within max_seq_len."""
    env = Calculator(max_new_tokens=2, max_turns=3)
    run = replace(quickstart(), env=env, shaping=Shaping(overlong_tokens=2))
    assert run.algorithm.max_new_tokens == 6
    assert replace(run, max_seq_len=5).algorithm.max_new_tokens == 5
    positions = run.model.config()["max_position_embeddings"]
    far = replace(run, env=replace(env, max_new_tokens=positions))
    assert learning_of(far).algorithm.max_new_tokens == positions < far.algorithm.max_new_tokens
    assert Agent(max_new_tokens=2, max_turns=3).most_sampled(5) == 6  # its conversations may be several
    assert replace(run, env=quickstart().env).algorithm.max_new_tokens == quickstart().env.max_new_tokens
    shaped = built([group(1, 0)], env=env, shaping=Shaping(overlong_tokens=2))
    assert shaped.means["reward/shaping"] == (0.0, 2)


def forked(reward, parts=Rewards()):
    """Two turns, then a branch after the first: turns of 2, 1 and 3 tokens, each sampled in one branch."""

    def given(*tokens):
        return Segment(list(tokens), False, [0.0] * len(tokens))

    def sampled(*tokens):
        return Segment(list(tokens), True, [-1.0] * len(tokens))

    first = (given(1, 2), sampled(3, 4), given(5), sampled(6))
    second = (given(1, 2), given(3, 4), given(7, 8), sampled(9, 10, 11))
    score = Score(reward, parts=parts)
    made = Rollout(
        Problem("1", "q", "a"), first, "", StopReason.STOP, VersionRange(0, 0), forks=(second,), score=score
    )
    return made, score


def test_branches_share_a_reward_and_each_token_is_learned_once():
    rollouts, scores = zip(forked(1.0), forked(0.0), strict=True)
    group = Group(0, rollouts, scores)
    batch = built([group])
    (made,) = batch.groups
    assert [sample.tokens.tolist() for sample in made.samples[:2]] == [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 7, 8, 9, 10, 11],
    ]
    learned = [sample.tokens[sample.loss_mask].tolist() for sample in made.samples[:2]]
    assert learned == [[3, 4, 6], [9, 10, 11]]
    assert (made.num_tokens, made.num_sequences) == (12, 2)
    advantages = {float(a) for sample in made.samples[:2] for a in sample.advantages[sample.loss_mask]}
    assert len(advantages) == 1 and advantages.pop() > 0


def test_a_branched_rollout_weighs_as_one_sequence_and_its_turns_have_their_own_rewards():
    rollouts, scores = zip(forked(1.0), forked(0.0), strict=True)
    batch = built([Group(0, rollouts, scores)], loss_agg="seq_mean")
    weights = [sample.weights[sample.loss_mask].sum() for sample in batch.groups[0].samples[:2]]
    assert weights == pytest.approx([0.5, 0.5])  # 3 of 6 tokens each
    rollout, score = forked(1.0, Rewards(turns=(0.25, 0.5, 0.25)))
    assert scatter_reward(rollout, score).tolist() == [0, 0.25, 0.5, 0, 0, 0.25]


def of_turns(lengths, order=(), branches=1):
    """Sampled tokens numbered in the order of sampling. order: turn_order; turns lie in two branches alternately."""
    starts = np.cumsum([0, *lengths])
    turns = [Segment(list(range(a, b)), True, [-1.0] * (b - a)) for a, b in itertools.pairwise(starts)]
    prompt = Segment([90], False, [0.0])
    parts = [(prompt, *turns[i::branches]) for i in range(branches)]
    rollout = Rollout(
        Problem("1", "q", "a"), parts[0], "", StopReason.STOP, VersionRange(0, 0), forks=tuple(parts[1:])
    )
    return replace(rollout, turn_order=order)


@pytest.mark.parametrize(
    "parts", [Rewards(turns=(0.0, 1.0, -2.0, 4.0)), Rewards(), Rewards(tokens=tuple(range(9)))]
)
@pytest.mark.parametrize("estimator", [ReinforcePP(discount=0.5), GAE(discount=0.9, lam=0.5), GroupMean()])
def test_two_conversations_by_turns_are_learned_from_in_the_order_of_their_turns(estimator, parts):
    """An agent and the one that it asks, a turn each: what a turn is followed by is the other's turn."""
    if isinstance(estimator, GroupMean) and parts != Rewards():
        return
    lengths, score = (2, 3, 1, 3), Score(3.0, parts=parts)
    one, two = of_turns(lengths), of_turns(lengths, (0, 2, 1, 3), branches=2)
    assert two.turn_tokens == [[0, 1], [5], [2, 3, 4], [6, 7, 8]]

    async def values(samples):
        return [np.sqrt(sample.tokens) for sample in samples]

    scorers = {"values": values} if isinstance(estimator, GAE) else {}
    algorithm = replace(
        quickstart(), advantages=estimator, critic=CriticConfig() if scorers else None
    ).algorithm
    learned = []
    for rollout in (one, two):
        other = of_turns((2,))
        batch = asyncio.run(
            build_training_batch([Group(0, (rollout, other), (score, Score(0.5)))], algorithm, scorers)
        )
        samples = batch.groups[0].samples[: len(rollout.branches)]
        learned.append({})
        for sample in samples:
            advantages = sample.advantages[sample.target_mask].tolist()
            returns = sample.loss_inputs["returns"][sample.target_mask].tolist() if scorers else advantages
            tokens = sample.tokens[sample.target_mask].tolist()
            learned[-1] |= {token: of for token, *of in zip(tokens, advantages, returns, strict=True)}
    assert learned[0].keys() == learned[1].keys() and len(learned[0]) == 9
    for token, expected in learned[0].items():
        assert learned[1][token] == pytest.approx(expected, rel=1e-6), token
    if not isinstance(estimator, GroupMean):
        assert len({advantage for advantage, _ in learned[0].values()}) > 4


def test_rewards_of_turns_that_the_advantages_do_not_read_end_the_step():
    """Of a run's own judge, which `rl check` does not ask."""
    rollouts, scores = zip(forked(1.0, Rewards(turns=(0.25, 0.5, 0.25))), forked(0.0), strict=True)
    with pytest.raises(RunError, match="not read by advantages GroupMean.*use GAE"):
        built([Group(0, rollouts, scores)])
    assert built([Group(0, rollouts, scores)], advantages=ReinforcePP()).groups


@pytest.mark.parametrize(("bound", "value"), [("_MANY_ROLLOUTS", 2), ("_MANY_TOKENS", 6)])
def test_advantages_of_a_large_batch_are_computed_beside_the_event_loop(bound, value, monkeypatch):
    monkeypatch.setattr(f"rl.controller.training_batch.{bound}", value)
    asked, may_end = threading.Event(), threading.Event()

    def slow_estimator(groups):
        asked.set()
        assert may_end.wait(10)
        return [[0.0] * len(members) for members in groups]

    async def main():
        algorithm = replace(quickstart().algorithm, advantages=slow_estimator)
        building = asyncio.create_task(build_training_batch([group(0, 1)], algorithm, {}))
        while not asked.is_set():
            await asyncio.sleep(0.001)
        may_end.set()
        assert len((await building).groups) == 1

    asyncio.run(main())


def test_returns_that_are_not_finite_name_their_estimator():
    class Own:
        needs_critic = True

        def __call__(self, groups):
            return [[0.0] * len(members) for members in groups]

        def returns(self, groups):
            return [[np.full(len(member.rewards), np.inf) for member in members] for members in groups]

    async def values(samples):
        return [np.zeros(len(sample)) for sample in samples]

    algorithm = replace(quickstart().algorithm, advantages=Own())
    with pytest.raises(RunError, match="advantages Own returned returns that are not finite"):
        asyncio.run(build_training_batch([group(0, 1)], algorithm, {"values": values}))


def test_the_group_that_is_kept_to_measure_parity_has_a_token(tmp_path):
    """Before it comes one of agents that never called the policy."""
    full = group(1, 1)
    silent = replace(full.rollouts[0], segments=full.rollouts[0].segments[:1], versions=None)
    samples, _ = learnt_from([Group(0, (silent,) * 2, full.scores), full], tmp_path)
    assert [sample.num_targets for sample in samples] == [3, 3]


def test_where_no_reward_is_read_what_was_sampled_is_learned_from_and_nothing_else():
    """As of a distillation whose rewards fail."""

    def loss(logprobs, inputs):
        raise NotImplementedError

    loss.needs_rewards = False
    failed = Score(0.0, "the server is gone", cause="lost")
    made = group(failed, failed)
    silent = replace(made.rollouts[0], segments=made.rollouts[0].segments[:1], versions=None)
    groups = [replace(made, rollouts=(made.rollouts[0], silent))]
    algorithm = replace(quickstart().algorithm, loss=loss)
    (trained,) = asyncio.run(build_training_batch(groups, algorithm, {})).groups
    assert (trained.num_sequences, trained.num_tokens, len(trained.samples)) == (1, 3, 1)
