"""Minibatches, epochs, denominators, and what happens to a loss or gradient that is not finite."""

# holds: exact

import asyncio
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.quickstart import quickstart
from rl.config import ReferenceConfig, WarmupConfig
from rl.config.validate import validate
from rl.controller.training_batch import TrainingGroup, build_training_batch, scatter_reward
from rl.controller.update import denominator, minibatches
from rl.controller.updaters import scorers
from rl.envs.sort_letters import SortLetters
from rl.errors import RunError
from rl.loss.advantages.gae import GAE
from rl.loss.correction import Correction
from rl.loss.cross_entropy import CrossEntropy
from rl.loss.kl import KL
from rl.types import Group, LoRA, Problem, Rewards, Rollout, Score, Segment, StopReason, VersionRange
from tests.controller.fakes import build, fake_actors, run_fakes


def config(**changes):
    base = replace(
        quickstart(),
        env=SortLetters(num_eval=2),
        warmup=WarmupConfig(),
        steps=2,
        prompts_per_step=6,
        group_size=4,
    )
    return replace(base, **changes)


run = run_fakes


def rollout(*segments, name="p"):
    """segments: token lists; every second one was sampled, the first was not."""
    made = tuple(Segment(list(tokens), i % 2 == 1, [-1.0] * len(tokens)) for i, tokens in enumerate(segments))
    return Rollout(Problem(name, "q", "a"), made, "", StopReason.STOP, VersionRange(0, 0))


@pytest.mark.parametrize(("num_minibatches", "epochs"), [(1, 1), (2, 1), (1, 3), (3, 2), (6, 2)])
def test_as_many_optimizer_steps_as_configured(tmp_path, num_minibatches, epochs):
    calls, recorder = run(config(minibatches=num_minibatches, epochs=epochs, advantages=GAE()), tmp_path)
    for who in ("trainer", "critic"):
        assert (
            sum(call[:2] == (who, "step") for call in calls) == 2 * num_minibatches * epochs
        )  # of two RL steps
    assert all(metrics["updates"] == num_minibatches * epochs for metrics in recorder.steps.values())


def test_every_epoch_deals_every_prompt_out_once_and_anew():
    units = [TrainingGroup([], i, 1) for i in range(12)]
    plan = minibatches(units, config(minibatches=4, epochs=3).algorithm, 0, 1)
    assert [len(part) for part in plan] == [3] * 12
    epochs = [[u.num_tokens for part in plan[4 * e : 4 * e + 4] for u in part] for e in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert (
        minibatches(units, config(minibatches=4, epochs=3).algorithm, 0, 1) == plan
    )  # a replayed step is the same


def test_denominators():
    units = [TrainingGroup([], 10, 4), TrainingGroup([], 30, 2)]
    assert denominator(units, config(loss_agg="token_mean").algorithm) == 40
    assert denominator(units, config(loss_agg="seq_mean").algorithm) == 6
    assert denominator(units, config(loss_agg="constant").algorithm) == 6 * 8  # env.max_new_tokens
    assert denominator(units, config(data="preferences").algorithm) == 2


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean", "constant"])
def test_the_loss_of_a_batch_is_the_mean_it_is_called_by(tmp_path, agg):
    """Two rollouts of 2 and 4 tokens with advantages 1 and -1: the mean by hand, and what the trainer is told to compute."""
    group = Group(0, (rollout([1], [5, 6]), rollout([1], [5, 6, 7, 8])), (Score(1.0), Score(0.0)))
    settings = config(loss_agg=agg, advantages=lambda groups: [[1.0, -1.0]])
    (unit,) = build([group], settings, tmp_path)[0].groups
    in_all = sum((s.advantages * s.weights)[s.target_mask].sum() for s in unit.samples)
    total = in_all / denominator([unit], settings.algorithm)
    assert total == pytest.approx(
        {"token_mean": (2 - 4) / 6, "seq_mean": (1 - 1) / 2, "constant": (2 - 4) / (2 * 8)}[agg]
    )


def test_rewards_of_turns_and_tokens_go_where_they_belong():
    two_turns = rollout([1, 2], [5, 6], [3], [7, 8, 9])
    assert scatter_reward(two_turns, Score(1.0)).tolist() == [0, 0, 0, 0, 1]
    assert scatter_reward(two_turns, Score(1.5, None, Rewards(turns=(0.5, 1.0)))).tolist() == [
        0,
        0.5,
        0,
        0,
        1.0,
    ]
    assert scatter_reward(two_turns, Score(1.5, None, Rewards(tokens=(1, 2, 3, 4, 5)))).tolist() == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert scatter_reward(two_turns, Score(1.0), bonus=-0.25).tolist() == [0, 0, 0, 0, 0.75]
    assert scatter_reward(rollout([1], []), Score(1.0)).tolist() == []
    turns = Score(3.0, None, Rewards(turns=(1.0, 2.0)))
    assert scatter_reward(rollout([1], [], [2], [5, 6]), turns).tolist() == [1.0, 2.0]
    assert scatter_reward(rollout([1], [5, 6], [2], []), turns).tolist() == [0, 3.0]
    assert scatter_reward(rollout([1], [], [2], []), turns).tolist() == []


def test_the_penalty_goes_off_the_reward_of_each_token(tmp_path):
    seen = []

    def estimator(groups):
        seen.extend(t.rewards for g in groups for t in g)
        return [[0.0] * len(g) for g in groups]

    settings = config(kl=KL(coef=0.5, estimator="k1", into="reward"), advantages=estimator)
    group = Group(0, (rollout([1], [5, 6, 7]),), (Score(1.0),))
    for correction in (Correction(), Correction(mask_high=2.0), Correction(old_logprobs="trainer")):
        settings = replace(settings, correction=correction, minibatches=2)
        batch, _ = build([group], settings, tmp_path)
        (sample,) = (s for g in batch.groups for s in g.samples)
        of_trainer = correction.old_logprobs == "trainer"  # a mask needs the trainer's, and measures alone
        policy = sample.loss_inputs["old_logprobs"] if of_trainer else sample.generator_logprobs
        kl = policy[1:] - sample.loss_inputs["ref_logprobs"][1:]
        assert seen.pop() == pytest.approx(np.array([0, 0, 1.0]) - 0.5 * kl)
        assert batch.metrics["kl"] == pytest.approx(kl.mean())


def test_samples_without_a_gradient_cost_no_forward_pass_but_those_of_a_kl_do(tmp_path):
    group = Group(0, (rollout([1], [5, 6]), rollout([1], [7, 8])), (Score(1.0), Score(1.0)))
    other = Group(0, (rollout([1], [5, 6]), rollout([1], [7, 8, 9])), (Score(1.0), Score(0.0)))

    def forwards(**changes):
        batch, calls = build([group, other], config(**changes), tmp_path)
        asked = {call[0]: call[3] for call in calls if call[1] == "forward"}
        return asked, [len(g.samples) for g in batch.groups]

    old = {"correction": Correction(old_logprobs="trainer"), "epochs": 2}
    assert forwards() == ({}, [0, 2])
    assert forwards(**old) == ({"trainer": 5}, [0, 2])
    assert forwards(correction=Correction(old_logprobs="trainer")) == (
        {},
        [0, 2],
    )  # one update: they are its own
    assert forwards(correction=Correction(mask_high=2.0)) == ({}, [0, 2])
    for mask in ({"mask_high": 2.0}, {"mask_low": 0.5}):  # they measure the first policy's gap
        assert forwards(correction=Correction(**mask), epochs=2) == ({"trainer": 5}, [0, 2])
    in_reward = {"correction": Correction(old_logprobs="trainer"), "kl": KL(coef=0.1, into="reward")}
    assert forwards(**in_reward) == ({"trainer": 9, "reference": 9}, [2, 2])
    assert forwards(kl=KL(coef=0.1)) == ({"reference": 9}, [2, 2])
    assert forwards(**old, advantages=GAE(), kl=KL(coef=0.1, into="reward")) == (
        {"trainer": 9, "reference": 9, "critic": 9},
        [2, 2],
    )


def test_forward_passes_overlap(tmp_path):
    """Each waits until all three have begun: one after the other they would never end."""
    settings = config(
        correction=Correction(old_logprobs="trainer"), epochs=2, advantages=GAE(), kl=KL(coef=0.1)
    )
    actors, _ = fake_actors(settings, tmp_path)

    async def main():
        begun, all_begun = [], asyncio.Event()
        for engine in (actors.trainer, actors.critic, actors.reference._engine):
            forward = engine.forward

            async def meet(batch, adapter=None, forward=forward):
                begun.append(1)
                if len(begun) == 3:
                    all_begun.set()
                await all_begun.wait()
                return await forward(batch, adapter)

            engine.forward = meet
        group = Group(0, (rollout([1], [5, 6]),), (Score(1.0),))
        inputs = scorers(settings.algorithm, actors)
        await asyncio.wait_for(build_training_batch([group], settings.algorithm, inputs), 5)

    asyncio.run(main())


@pytest.mark.parametrize("where", ["adapter", "mesh"])
def test_a_lora_policys_reference_needs_no_second_copy_of_the_model(tmp_path, where):
    trainer = replace(config().trainer, lora=LoRA(rank=4 if where == "adapter" else 0))
    settings = config(trainer=trainer, kl=KL(coef=0.1), warmup=WarmupConfig(steps=1, batch_size=2))
    calls, _ = run(settings, tmp_path)
    names = {call[0] for call in calls}
    assert ("reference" in names) == (where == "mesh")
    if where == "adapter":
        assert ("trainer", "copy_adapter", "policy", "reference") in calls and any(
            call[:3] == ("trainer", "forward", "reference") for call in calls
        )


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
@pytest.mark.parametrize(("updates", "step", "update"), [(1, 4, 1), (2, 2, 2)])
def test_what_is_not_finite_stops_the_run_with_its_step_metric_and_sample(
    tmp_path, metric, updates, step, update
):
    calls, _ = run(config(steps=5, minibatches=updates), tmp_path / "well")
    ends = [i for i, call in enumerate(calls) if call[:2] == ("trainer", "step")]
    token = next(
        call[2][-1] for call in calls[ends[2] : ends[3]] if call[:2] == ("trainer", "learn")
    )  # of the fourth update
    with pytest.raises(RunError) as error:
        run(config(steps=5, minibatches=updates, save_every=1), tmp_path, fail_on=(metric, token, 3))
    message = str(error.value)
    assert re.match(
        rf"step {step}, update {update} of {updates} of the trainer: .*\({metric}\); the sample is \w+, rollout \d",
        message,
    ), message
    assert message.endswith(f"go on from --resume {tmp_path / 'checkpoints' / f'step-{step - 1}'}")


def test_streamed_groups_make_one_update_of_the_whole_step(tmp_path):
    """The same rollouts, denominators and advantages as when the step waits for all of them."""

    def of(stream_groups):
        calls, recorder = run(config(steps=1, stream_groups=stream_groups), tmp_path / str(stream_groups))
        learned = [call[2] for call in calls if call[:2] == ("trainer", "learn")]
        stepped = [call[2] for call in calls if call[:2] == ("trainer", "step")]
        return (
            sorted(token for tokens in learned for token in tokens),
            stepped,
            recorder.steps[1],
            len(learned),
        )

    tokens, stepped, metrics, num_micro_batches = of(0)
    tokens_2, stepped_2, metrics_2, num_micro_batches_2 = of(2)
    assert tokens_2 == tokens and stepped_2 == stepped and len(stepped) == 1
    assert num_micro_batches_2 == 3 * num_micro_batches
    same = [
        name
        for name in metrics
        if name.startswith(("reward", "advantages", "tokens", "offpolicy", "updates"))
    ]
    assert len(same) > 8 and {n: metrics_2[n] for n in same} == pytest.approx({n: metrics[n] for n in same})


def test_a_streamed_part_that_is_not_finite_names_its_sample(tmp_path):
    with pytest.raises(RunError, match=r"step 1, groups 0 to 1: the loss is nan \(loss\); the sample is \w+"):
        run(config(stream_groups=2), tmp_path, fail_on=("loss", 20, 0))


def test_where_nothing_was_saved_the_weights_before_the_failure_are(tmp_path):
    with pytest.raises(
        RunError,
        match=r"step 1, update 1 of 1 of the trainer: the loss is nan \(loss\); .* go on from --resume .*step-0",
    ):
        run(config(), tmp_path, fail_on=("loss", 20, 0))
    assert (tmp_path / "checkpoints" / "step-0" / ".metadata").exists()
    record = json.loads((tmp_path / "checkpoints" / "step-0" / "record.json").read_text())
    prompts = record["state"]["prompts"]
    assert set(prompts) == {"next", "unfinished", "held", "scored_by"}
    assert (prompts["next"], prompts["unfinished"]) == (6, [0, 1, 2, 3, 4, 5])  # the step's own


def test_the_sample_to_blame_is_one_with_the_bad_token(tmp_path):
    with pytest.raises(RunError) as error:
        run(config(), tmp_path, fail_on=("grad_norm", 20, 0))
    problem, number = re.search(r"the sample is (\w+), rollout (\d)", str(error.value)).groups()
    _, recorder = run(config(steps=1), tmp_path / "again")
    (group,) = [g for g in recorder.groups[1] if g.rollouts[0].problem.id == problem]
    assert 20 in group.rollouts[int(number)].segments[-1].tokens


def test_where_every_sample_fails_the_weights_are_to_blame(tmp_path):
    with pytest.raises(RunError, match=r"every sample that was tried fails alone, .* so look at the weights"):
        run(config(), tmp_path, fail_on=("loss", None, 0))


@pytest.mark.parametrize("rank", [0, 4])
def test_an_update_that_leaves_no_finite_weights_is_blamed_on_no_sample(rank, tmp_path):
    """An adapter's is undone: what the run had before is saved."""
    settings = config(trainer=replace(config().trainer, lora=LoRA(rank=rank)))
    with pytest.raises(RunError, match=r"\(weights\); no sample is to blame") as error:
        run(settings, tmp_path, fail_on=("weights", None, 1))
    is_saved = (tmp_path / "checkpoints" / "step-1" / ".metadata").exists()
    assert is_saved == (rank > 0)
    rest = "go on from --resume .*step-1" if rank else "set save_every to at most 1, and at least 1"
    assert re.search(rest, str(error.value))


def test_where_the_first_steps_second_update_fails_nothing_earlier_could_have_been_saved(tmp_path):
    with pytest.raises(RunError, match="update 2 of 2 of the trainer: .*; begin the run again"):
        run(config(minibatches=2, save_every=0), tmp_path, fail_on=("loss", None, 1))


def test_a_warm_up_that_is_not_finite_says_so(tmp_path):
    with pytest.raises(RunError, match="warm-up step 1: the loss is nan; lower warmup.lr=0.003"):
        run(config(warmup=WarmupConfig(steps=1, batch_size=2)), tmp_path, fail_on=("loss", None, 0))


@pytest.mark.parametrize("seed", range(5))
def test_the_gap_is_measured_though_most_minibatches_have_no_signal(seed):
    """It is measured on the first of each epoch."""
    without, with_signal = TrainingGroup([], 1, 1), TrainingGroup([None], 1, 1)
    algorithm = config(minibatches=3, epochs=2).algorithm
    plan = minibatches([without] * 5 + [with_signal], algorithm, seed, 1)
    assert [with_signal in part for part in plan] == 2 * [True, False, False]


def test_a_metric_of_ones_own_says_how_it_is_combined(tmp_path):
    from rl.loss.base import LossOutput
    from rl.loss.objective import Objective

    own = {"largest:max": torch.tensor(3.0), "mean:sum": torch.tensor(5.0)}
    settings = config(loss=lambda logprobs, inputs: LossOutput(logprobs.sum(), own), minibatches=2)
    _, recorder = run(settings, tmp_path)
    assert recorder.steps[1]["largest/max"] == 3.0 and "mean" in recorder.steps[1]
    with pytest.raises(
        RunError, match="metric 'own' does not say how tokens are combined; call it own:sum or own:max"
    ):
        Objective(lambda logprobs, inputs: LossOutput(logprobs.sum(), {"own": 1.0}))(
            torch.zeros(1), masked(1)
        )


def test_supervised_losses_of_ones_own_get_a_reference_where_they_ask_for_one(tmp_path):
    def plain(logprobs, inputs):
        return CrossEntropy()(logprobs, inputs)

    def with_reference(logprobs, inputs):
        return CrossEntropy()(logprobs - inputs.loss_input("ref_logprobs"), inputs)

    with_reference.needs_reference = True
    for data in ("demonstrations", "preferences"):
        for loss in (plain, with_reference):
            calls, _ = run(config(data=data, loss=loss), tmp_path / data / loss.__name__)
            assert any(call[0] == "reference" for call in calls) == (loss is with_reference)


def masked(n):
    from rl.loss.base import TokenInputs

    return TokenInputs(torch.zeros(n), torch.zeros(n), torch.ones(n), torch.zeros(n, dtype=torch.long))


def test_an_estimator_at_fault_is_named(tmp_path):
    def lopsided(groups):
        return [[0.0] for _ in groups]

    def infinite(groups):
        return [[float("inf")] * len(g) for g in groups]

    def long(groups):
        return [[np.zeros(99)] * len(g) for g in groups]

    group = Group(0, (rollout([1], [5, 6]), rollout([1], [7, 8])), (Score(1.0), Score(0.0)))
    for estimator, words in (
        (lopsided, "returned advantages for"),
        (infinite, "that are not finite"),
        (long, r"returned \(99,\) advantages"),
    ):
        settings = config(advantages=estimator)
        with pytest.raises(
            RunError,
            match=f"advantages {estimator.__name__} .*{words}|advantages {estimator.__name__} {words}",
        ):
            build([group], settings, tmp_path)


def test_advantages_of_one_number_reach_every_token(tmp_path):
    settings = config(advantages=lambda groups: [[2.0, np.array([1.0, 0.0, -1.0])] for _ in groups])
    group = Group(0, (rollout([1], [5, 6]), rollout([1], [7, 8, 9])), (Score(1.0), Score(0.0)))
    batch, _ = build([group], settings, tmp_path)
    first, second = batch.groups[0].samples
    assert first.advantages.tolist() == [0, 2, 2] and second.advantages.tolist() == [0, 1, 0, -1]


def test_a_references_weights_stay_on_disk_while_a_checkpoint_notes_them(tmp_path):
    settings = config(
        steps=6,
        save_every=3,
        kl=KL(coef=0.1),
        reference=ReferenceConfig(refresh_every=2),
        warmup=WarmupConfig(steps=1, batch_size=2),
    )
    run(settings, tmp_path)
    # The reference of step 0 gave way at step 2, unnoted; that of step 2 is noted by checkpoint 3, step 4's by none, step 6's by 6.
    assert {path.name for path in (tmp_path / "reference").iterdir()} == {"step-2", "step-6"}


def test_a_references_weights_go_with_the_checkpoints_that_noted_them(tmp_path):
    settings = config(
        steps=6,
        save_every=1,
        keep_checkpoints=1,
        kl=KL(coef=0.1),
        reference=ReferenceConfig(refresh_every=1),
        advantages=GAE(),
    )
    run(settings, tmp_path)
    # A checkpoint may still be being written when the next refresh comes, so the one before it is there too.
    assert {path.name for path in (tmp_path / "reference").iterdir()} == {"step-5", "step-6"}
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-6"}
    assert {path.name for path in (tmp_path / "critic_checkpoints").iterdir()} == {
        "step-5",
        "step-6",
    }  # one more: it is written first


def resumed(tmp_path, before, after):
    """What a run that goes on from another's step 1 asks of its actors, or what keeps it from starting."""
    run(before, tmp_path / "first")
    settings = replace(after, resume=str(tmp_path / "first" / "checkpoints" / "step-1"))
    return validate(settings) or run(settings, tmp_path / "second")[0]


def test_a_resumed_run_has_the_reference_that_its_checkpoint_noted(tmp_path):
    settings = config(save_every=1, kl=KL(coef=0.1), warmup=WarmupConfig(steps=1, batch_size=2))
    calls = resumed(tmp_path, settings, settings)
    assert ("trainer", "load_checkpoint", "step-1") in calls
    (loaded,) = [call[2] for call in calls if call[:2] == ("reference", "load_weights")]
    assert loaded.startswith("step-0-from-")  # a copy: the first run removes its own when it likes
    shutil.rmtree(tmp_path / "first" / "reference")
    (line,) = validate(replace(settings, resume=str(tmp_path / "first" / "checkpoints" / "step-1")))
    assert "notes the reference's weights" in line and "which are gone" in line


def test_a_run_that_was_moved_has_its_own_reference_whatever_is_where_it_was(tmp_path):
    settings = config(save_every=1, kl=KL(coef=0.1), warmup=WarmupConfig(steps=1, batch_size=2))
    run(settings, tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")
    (tmp_path / "first" / "reference" / "step-0").mkdir(parents=True)  # another run's
    going_on = replace(settings, steps=3, resume=str(tmp_path / "moved" / "checkpoints" / "step-1"))
    assert validate(going_on) == []
    calls = run(going_on, tmp_path / "moved")[0]
    loaded = [call[2] for call in calls if call[:2] == ("reference", "load_weights")]
    assert loaded == ["step-0"]  # no copy: it is its own
    assert [path.name for path in (tmp_path / "moved" / "reference").iterdir()] == ["step-0"]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {"kl": KL(coef=0.1)}, "saved with reference: none, but the run has: policy"),
        (
            {"kl": KL(coef=0.1)},
            {"kl": KL(coef=0.1), "reference": "teacher"},
            "saved with reference: policy, but the run has: teacher",
        ),
        (
            {"kl": KL(coef=0.1), "reference": "teacher"},
            {"kl": KL(coef=0.1)},
            "saved with reference: teacher, but the run has: policy",
        ),
        ({}, {"advantages": GAE()}, "has no critic beside it"),
    ],
)
def test_a_run_does_not_go_on_with_another_reference_or_without_its_critic(tmp_path, before, after, words):
    def settings(changes):
        teacher = (
            {"reference": ReferenceConfig(model=quickstart().model)}
            if changes.get("reference") == "teacher"
            else {}
        )
        return config(save_every=1, **(changes | teacher))

    found = resumed(tmp_path, settings(before), settings(after))
    assert len(found) == 1 and words in found[0], found


def test_a_streamed_part_that_fails_loses_no_weights(tmp_path):
    with pytest.raises(RunError, match=r"step 1, groups 0 to 1: .* go on from --resume .*step-0"):
        run(config(stream_groups=2), tmp_path, fail_on=("loss", 20, 0))
    assert (tmp_path / "checkpoints" / "step-0" / ".metadata").exists()


def test_one_pair_alone_is_divided_by_nothing_and_so_is_none():
    pairs = config(data="preferences").algorithm
    assert [denominator([TrainingGroup([], 10, 2)] * number, pairs) for number in (0, 1, 3)] == [1, 1, 3]
