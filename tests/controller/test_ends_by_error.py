"""A run that ends by an error while its trainer is well: what is done is saved, and what went wrong is written down."""

# holds: exact

import asyncio
import json
from dataclasses import dataclass, replace

import pytest

from configs.quickstart import quickstart
from rl.config import WarmupConfig
from rl.config.learning import learning_of
from rl.controller import stages as stages_module
from rl.controller.held_groups import read_prompts
from rl.controller.stages import RunStages
from rl.envs.sort_letters import SortLetters
from rl.errors import RunError
from rl.loss.advantages.gae import GAE
from rl.loss.correction import Correction
from rl.models.checkpoint_dir import latest
from rl.models.tokenizer import HFTokenizer
from rl.observability.recorder import Recorder
from rl.observability.sinks import Sinks
from rl.observability.timeline import Timeline
from rl.types import Score
from tests.controller.fakes import FakeEngine, QuietRecorder, fake_actors


def config(**settings):
    small = {"prompts_per_step": 4, "group_size": 3, "steps": 30, "save_every": 20, "eval_every": 20}
    env = SortLetters(num_eval=2)
    return replace(quickstart(), **{"env": env, "warmup": WarmupConfig(), **small, **settings})


class Rewards:
    """Alternating ones; from the one after `well` on, none."""

    def __init__(self, well, cause="judge"):
        self.left, self.cause = well, cause

    async def score(self, rollouts):
        self.left -= len(rollouts)
        if self.left < 0:
            return [Score(0.0, "no answer", cause=self.cause) for _ in rollouts]
        return [Score(float(i % 2)) for i, _ in enumerate(rollouts)]


def run_to_its_end(config, directory, recorder, rewards=None):
    """What ended it."""
    actors, _ = fake_actors(config, directory)
    if rewards is not None:
        actors = replace(actors, rewards=rewards)
    tokenizer = HFTokenizer(config.model.materialize(directory))
    stages = RunStages(learning_of(config), "", actors, tokenizer, recorder)
    with pytest.raises(Exception) as end:
        asyncio.run(stages.run())
    return end.value


def test_steps_before_a_judges_outage_are_saved_and_its_groups_are_no_part_of_the_checkpoint(tmp_path):
    recorder = QuietRecorder(tmp_path)
    settings = config()
    end = run_to_its_end(settings, tmp_path, recorder, Rewards(2 + 4 * 12))
    assert isinstance(end, RunError) and "all 12 rewards failed" in str(end)
    assert list(recorder.steps) == [1, 2, 3, 4] and list(recorder.failed) == [(5, "train")]
    newest = latest(tmp_path / "checkpoints")
    assert newest.name == "step-4"
    state = json.loads((newest / "record.json").read_text())["state"]
    left = read_prompts(str(newest), state["prompts"], learning_of(settings).scored_by)
    assert left.unfinished == [16, 17, 18, 19] and left.held == []


@pytest.mark.parametrize(("well", "place"), [(0, (0, "eval")), (2, (1, "train"))])
def test_rollouts_whose_rewards_all_failed_are_in_the_file_that_the_error_names(tmp_path, well, place):
    async def main():
        settings = config()
        actors, _ = fake_actors(settings, tmp_path)
        actors = replace(actors, rewards=Rewards(well, "raised"))
        tokenizer = HFTokenizer(settings.model.materialize(tmp_path))
        async with Recorder(tmp_path, settings.steps, Timeline(), Sinks({})) as recorder:
            await RunStages(learning_of(settings), "", actors, tokenizer, recorder).run()

    with pytest.raises(RunError, match="rewards failed, the first: no answer; .* its rollouts.jsonl"):
        asyncio.run(main())
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    failed = [(row["step"], row["split"]) for row in rows if row["error"] == "no answer"]
    assert failed and {*failed} == {place}


def test_the_first_step_of_a_run_that_goes_on_begins_after_its_start(tmp_path):
    """Else its seconds had all processes' start in them, which a fresh run's first evaluation cuts off."""
    first = QuietRecorder(tmp_path)
    run_to_its_end(config(), tmp_path, first, Rewards(2 + 4 * 12))
    assert first.num_pauses == 0
    settings = config(steps=6, resume=str(latest(tmp_path / "checkpoints")))
    actors, _ = fake_actors(settings, tmp_path)
    recorder = QuietRecorder(tmp_path)
    recorder.accuracies = first.evaluations
    tokenizer = HFTokenizer(settings.model.materialize(tmp_path))
    asyncio.run(
        RunStages(learning_of(settings), settings.resume, actors, tokenizer, recorder, goes_on=True).run()
    )
    assert list(recorder.steps) == [5, 6] and recorder.num_pauses == 1


@pytest.mark.parametrize("is_stuck", [True, False])
def test_an_error_of_the_trainers_forward_pass_is_what_the_run_ends_with(tmp_path, monkeypatch, is_stuck):
    """Where a rank has not answered nothing more is asked of it, and where leaving fails that is said, too."""
    settings = config(correction=Correction(old_logprobs="trainer"), minibatches=2)
    forward, calls = FakeEngine.forward, []

    async def third_fails(engine, batch, adapter=None):
        calls.append("forward")
        if len(calls) == 3:
            engine._caller.is_stuck = is_stuck
            raise RunError("out of memory")
        return await forward(engine, batch, adapter)

    async def finish(engine):
        if len(calls) == 3:
            calls.append("finish")
            raise RunError("trainer did not finish finish_checkpoint")

    monkeypatch.setattr(FakeEngine, "forward", third_fails)
    monkeypatch.setattr(FakeEngine, "finish_checkpoint", finish)
    recorder, lines = QuietRecorder(tmp_path), []
    recorder.say = lines.append
    end = run_to_its_end(settings, tmp_path, recorder)
    assert str(end) == "out of memory" and list(recorder.steps) == [1, 2]
    assert calls.count("finish") == (not is_stuck)
    assert any("no checkpoint of step 2: trainer did not finish" in line for line in lines) == (not is_stuck)


@dataclass(frozen=True)
class Ends(SortLetters):
    """Its data has a broken row."""

    def generate(self, seed):
        if made.append(seed) or len(made) > 40:
            raise ValueError("row 4711 has no answer")
        return super().generate(seed)


made = []


def test_a_problem_that_cannot_be_made_ends_the_run_between_two_steps(tmp_path):
    made.clear()
    recorder = QuietRecorder(tmp_path)
    end = run_to_its_end(config(env=Ends(num_eval=2)), tmp_path, recorder)
    assert isinstance(end, RunError) and "ValueError: row 4711" in str(end)
    done = list(recorder.steps)[-1]
    assert done > 5 and latest(tmp_path / "checkpoints").name == f"step-{done}"


def test_an_evaluation_beside_training_that_fails_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    evaluate = stages_module.RunStages.evaluate

    async def failing(self, step):
        await evaluate(self, step)
        if step == 2:
            raise RunError("evaluation of step 2 failed")

    monkeypatch.setattr(stages_module.RunStages, "evaluate", failing)
    monkeypatch.setattr(stages_module.Schedule, "evaluates", lambda self, step: step in (0, 2, 22, 30))
    recorder = QuietRecorder(tmp_path)
    end = run_to_its_end(config(max_offpolicy_steps=1), tmp_path, recorder)
    assert str(end) == "evaluation of step 2 failed" and list(recorder.steps)[-1] < 6


@pytest.mark.parametrize("is_stuck", [True, False])
def test_no_checkpoint_is_asked_for_where_a_rank_of_the_critic_hangs(tmp_path, monkeypatch, is_stuck):
    """Its part comes first: it would be waited for until the deadline of checkpoints."""
    forward, save, asked, saved = FakeEngine.forward, FakeEngine.save_checkpoint, [], []

    async def third_fails(engine, batch, adapter=None):
        if engine.name == "critic":
            asked.append(batch)
            if len(asked) == 3:
                engine._caller.is_stuck = is_stuck
                raise RunError("out of memory")
        return await forward(engine, batch, adapter)

    async def note(engine, *arguments, **options):
        saved.append((engine.name, len(asked)))
        return await save(engine, *arguments, **options)

    monkeypatch.setattr(FakeEngine, "forward", third_fails)
    monkeypatch.setattr(FakeEngine, "save_checkpoint", note)
    end = run_to_its_end(config(advantages=GAE()), tmp_path, QuietRecorder(tmp_path))
    assert str(end) == "out of memory"
    assert [name for name, count in saved if count == 3] == ([] if is_stuck else ["critic", "trainer"])
