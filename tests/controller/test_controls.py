"""What a run learns of itself from step to step, over a resume, and what it trains on meanwhile."""

# holds: exact

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from configs.algorithms import sft
from configs.quickstart import quickstart
from rl.config import WarmupConfig
from rl.envs.sort_letters import SortLetters
from rl.errors import RunError
from rl.loss.entropy import EntropyBonus
from rl.types import Score
from tests.controller import fakes
from tests.controller.fakes import FakeEngine, FakeRewards, run_fakes

SMALL = replace(
    quickstart(), env=SortLetters(num_eval=2), warmup=WarmupConfig(), save_every=1, keep_checkpoints=0,
    prompts_per_step=2, group_size=3, eval_every=10,
)  # fmt: skip


def loss(config, run_dir, **changes):
    """Of step 3: (as the trainer was given it, entropy/coef)."""
    run_dir.mkdir()
    calls, recorder = run_fakes(replace(config, **changes), run_dir)
    (*_, learned) = [call for call in calls if call[:2] == ("trainer", "learn")]
    return learned[3], recorder.steps[3].get("entropy/coef")


@pytest.mark.parametrize(
    "before", [EntropyBonus(), EntropyBonus(coef=0.5), EntropyBonus(target=9.0, adapt=0.25)]
)
@pytest.mark.parametrize(
    "after", [EntropyBonus(), EntropyBonus(coef=0.5), EntropyBonus(target=9.0, adapt=0.1)]
)
def test_a_resumed_run_has_the_entropy_bonus_of_its_own_settings(before, after, tmp_path):
    """As one that had them from the beginning, where the coefficient is fixed; where it is controlled, from there on."""
    (tmp_path / "first").mkdir()
    run_fakes(replace(SMALL, steps=2, entropy=before), tmp_path / "first")
    there = str(tmp_path / "first" / "checkpoints" / "step-2")
    resumed = loss(SMALL, tmp_path / "resumed", steps=3, resume=there, entropy=after)
    if after.target:
        assert resumed[1] == 0.0  # where its control begins
    else:
        assert resumed == loss(SMALL, tmp_path / "whole", steps=3, entropy=after)


def test_a_target_is_held_against_the_entropy_of_all_that_was_sampled(tmp_path, monkeypatch):
    """Every second prompt is solved, with little entropy. A bonus may act: none is left out, whether or not it does."""

    class Rewards(FakeRewards):
        number = 0

        async def score(self, rollouts):
            self.number += 1
            return [Score(1.0 if self.number % 2 else float(i % 2)) for i, _ in enumerate(rollouts)]

    learn = FakeEngine.forward_backward

    async def with_entropy(self, batch, loss, adapter=None):
        totals = await learn(self, batch, loss, adapter)
        each = [np.where(micro.advantages != 0, 0.4, 0.05).sum() for rank in batch.ranks for micro in rank]
        return {**totals, "entropy:sum": float(sum(each))}

    monkeypatch.setattr(fakes, "FakeRewards", Rewards)
    monkeypatch.setattr(FakeEngine, "forward_backward", with_entropy)
    config = replace(SMALL, steps=4, entropy=EntropyBonus(target=0.3), prompts_per_step=4, group_size=4)
    _, recorder = run_fakes(config, tmp_path)
    assert all(metrics["entropy"] < 0.3 for metrics in recorder.steps.values())
    assert [metrics["entropy/coef"] for metrics in recorder.steps.values()] == [
        0.0, 0.005, 0.01, pytest.approx(0.015)
    ]  # fmt: skip


def test_a_resumed_run_remembers_for_how_long_generator_and_trainer_have_differed(tmp_path, monkeypatch):
    learn, apart_by = FakeEngine.forward_backward, {}

    async def apart(self, batch, loss, adapter=None):
        totals = await learn(self, batch, loss, adapter)
        step = self.updates + 1
        over = apart_by.get(step, 4e-3 if 3 <= step <= 14 else 1e-5)
        return {**totals, "logprob_diff:sum": over * totals["tokens:sum"]}

    monkeypatch.setattr(FakeEngine, "forward_backward", apart)

    def run(name, steps, resume=""):
        (tmp_path / name).mkdir()
        _, recorder = run_fakes(replace(SMALL, steps=steps, resume=resume), tmp_path / name)
        return [metrics.get("logprob_diff/steps_over_limit", 0) for metrics in recorder.steps.values()]

    assert run("whole", 8) == [0, 0, 1, 2, 3, 4, 5, 6]
    checkpoints = tmp_path / "whole" / "checkpoints"
    assert run("after-2", 5, str(checkpoints / "step-2")) == [1, 2, 3]
    assert run("after-4", 5, str(checkpoints / "step-4")) == [3]
    with pytest.raises(RunError, match="for 10 steps"):
        run("too-long", 14, str(checkpoints / "step-8"))
    apart_by[3] = 5.0  # nats: the new generators compute something else
    with pytest.raises(RunError, match="differ from the trainer's by 5 nats"):
        run("broken", 5, str(checkpoints / "step-2"))


def test_the_time_of_a_publication_is_one_steps(tmp_path, monkeypatch):
    """That before the first step is none's."""
    publish = FakeEngine.publish_weights

    async def slowly(self, *arguments):
        await asyncio.sleep(0.1)
        return await publish(self, *arguments)

    monkeypatch.setattr(FakeEngine, "publish_weights", slowly)
    config = replace(sft(), env=SortLetters(num_eval=2), warmup=WarmupConfig(), steps=3, save_every=0, eval_every=3,
                     prompts_per_step=2)  # fmt: skip
    _, recorder = run_fakes(config, tmp_path)
    seconds = [metrics["time/sync_blocking"] for metrics in recorder.steps.values()]
    assert seconds[:2] == [0.0, 0.0] and seconds[2] >= 0.1  # holds: meaning, it slept so long


def test_what_was_sampled_and_not_trained_on_is_counted_and_part_of_a_step_s_metrics(tmp_path):
    """Else rewards would be of prompts alone that are neither solved nor hopeless."""
    config = replace(SMALL, steps=3, prompts_per_step=4, group_size=2)
    for name in ("all", "some"):
        (tmp_path / name).mkdir()
    _, whole = run_fakes(config, tmp_path / "all")
    _, recorder = run_fakes(replace(config, resampling_rounds=1), tmp_path / "some")
    assert not any("resampling/extra_prompts" in metrics for metrics in whole.steps.values())
    extra = [recorder.steps[step]["resampling/extra_prompts"] for step in (1, 2, 3)]
    assert extra == [len(recorder.groups[step]) - 4 for step in (1, 2, 3)] and any(extra)
    for step in (1, 2, 3):
        scores = [score for group in recorder.groups[step] for score in group.scores]
        failed = sum(score.error is not None for score in scores)
        assert len(scores) == 2 * (4 + extra[step - 1]) and recorder.steps[step]["reward/errors"] == failed
