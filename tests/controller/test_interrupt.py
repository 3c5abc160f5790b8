"""A run that is interrupted, at any moment, saves whole steps; what resumes does the rest, once."""

import asyncio
import json
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.calculator import calculator
from configs.quickstart import quickstart
from rl.config import ReferenceConfig, WarmupConfig
from rl.config.codec import write_config
from rl.config.learning import learning_of
from rl.config.resume import with_newest_checkpoint
from rl.controller import run as running
from rl.controller import stages
from rl.controller.recovery import finish_last
from rl.controller.stages import RunStages
from rl.envs.sort_letters import SortLetters
from rl.errors import RunError
from rl.loss.entropy import EntropyBonus
from rl.loss.kl import KL
from rl.models.checkpoint_dir import latest
from rl.models.tokenizer import HFTokenizer
from tests.controller.awaits import waiting
from tests.controller.fakes import QuietRecorder, fake_actors, run_fakes
from tests.controller.whole_run import World
from tests.virtual_time import VirtualLoop, run_virtually

STEPS, PROMPTS = 4, 4
REFRESHED = {"kl": KL(coef=0.1), "reference": ReferenceConfig(refresh_every=1)}


def config(**changes):
    base = replace(
        quickstart(), env=SortLetters(num_eval=2), warmup=WarmupConfig(steps=1, batch_size=2), steps=STEPS,
        prompts_per_step=PROMPTS, group_size=3, eval_every=2, entropy=EntropyBonus(target=9.0),
    )  # fmt: skip
    return replace(base, **changes)


def interrupt(settings, directory, ticks):
    """Cancel the run after so many turns of the event loop. Returns calls, recorder, and whether it was over."""
    actors, calls = fake_actors(settings, directory)
    recorder = QuietRecorder(directory)
    tokenizer = HFTokenizer(settings.model.materialize(directory))

    async def run():
        task = asyncio.create_task(
            RunStages(learning_of(settings), settings.resume, actors, tokenizer, recorder).run()
        )
        for _ in range(ticks):
            if task.done():
                break
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
            return True
        except asyncio.CancelledError:
            return False

    return calls, recorder, asyncio.run(run())


@pytest.mark.parametrize(("told", "count"), [("", 2), ("/a/file", 1)])
def test_slurm_tells_a_job_that_it_preempts_twice_to_end(told, count, monkeypatch):
    """By its own time limit, and by the job's --signal: the checkpoint is written all the same."""
    handlers, cancelled = [], []
    monkeypatch.setattr(running, "on_interrupt", handlers.append)
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=iter((10.0, 40.0, 40.0)).__next__))
    if told:
        monkeypatch.setenv("RL_TOLD", told)

    async def run_recipe(*_):
        for _ in range(2):
            handlers[0](signal.SIGTERM)
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                cancelled.append(1)

    monkeypatch.setattr(running, "run_recipe", run_recipe)
    asyncio.run(running._main("quickstart", config(), Path("run"), False, False, ()))
    assert len(cancelled) == count


def test_between_an_update_and_its_line(tmp_path):
    """While the weights are published: the step is done, and is recorded before it is saved."""
    settings = config(save_every=0)
    actors, _ = fake_actors(settings, tmp_path)
    recorder, publishing = QuietRecorder(tmp_path), asyncio.Event()
    write = actors.trainer.publish_weights

    async def publish(version, adapter=None):
        if version == 2:
            publishing.set()
            await asyncio.sleep(1000)
        return await write(version, adapter)

    actors.trainer.publish_weights = publish

    async def run():
        tokenizer = HFTokenizer(settings.model.materialize(tmp_path))
        task = asyncio.create_task(
            RunStages(learning_of(settings), settings.resume, actors, tokenizer, recorder).run()
        )
        await publishing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), 20))
    assert latest(tmp_path / "checkpoints").name == "step-2" and max(recorder.steps) == 2


def learned(calls):
    """The tokens of each batch; its losses follow from the fake engine's own count of updates."""
    return [call[2] for call in calls if call[:2] == ("trainer", "learn")]


@pytest.mark.parametrize(
    "changes", [{}, {"max_offpolicy_steps": 1}, {"stream_groups": 2}, {"minibatches": 2}, REFRESHED]
)
def test_at_any_moment(changes, tmp_path):
    settings = config(save_every=0, **changes)
    whole, _ = run_fakes(settings, tmp_path / "whole")
    seen = set()
    for ticks in range(1, 2000, 9):
        first = tmp_path / str(ticks)
        first.mkdir()
        _, recorder, over = interrupt(settings, first, ticks)
        if over:
            break
        checkpoint = latest(first / "checkpoints")
        assert (checkpoint is None) == (not recorder.steps)
        if checkpoint is None:
            continue
        done = max(recorder.steps)
        if settings.reference.refresh_every:  # it is due after the step, before its checkpoint
            record = json.loads((checkpoint / "record.json").read_text())
            assert record["state"]["reference"][1].endswith(f"step-{done}")
        assert checkpoint.name == f"step-{done}" and set(recorder.steps) == set(range(1, done + 1))
        if done in seen or done == STEPS:
            continue
        seen.add(done)
        rest, resumed = run_fakes(replace(settings, resume=str(checkpoint)), tmp_path / f"{ticks}-resumed")
        groups = [g for r in (recorder, resumed) for step in r.groups.values() for g in step]
        counts = Counter(group.index for group in groups)
        assert set(counts.values()) == {1}
        assert set(resumed.steps) == set(range(done + 1, STEPS + 1))
        if not settings.max_offpolicy_steps:  # the same batches, in the same order
            assert set(counts) == set(range(STEPS * PROMPTS))
            assert learned(whole)[-len(learned(rest)) :] == learned(rest)
    assert over and len(seen) >= STEPS - 2


def test_latest_is_the_newest_checkpoint_of_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, (line,) = with_newest_checkpoint("quickstart", config(resume="latest"))
    assert "a run of quickstart in runs/ has no complete checkpoint" in line
    run_fakes(config(), tmp_path / "runs" / "quickstart-1")
    write_config(tmp_path / "runs" / "quickstart-1", "quickstart", config())
    found, none = with_newest_checkpoint("quickstart", config(resume="latest"))
    assert found.resume == f"runs/quickstart-1/checkpoints/step-{STEPS}" and not none
    (tmp_path / "linked").symlink_to(tmp_path)
    write_config(tmp_path / "runs" / "quickstart-1", f"{tmp_path}/mine.py:quickstart", config())
    for source in (f"{tmp_path}/mine.py:quickstart", f"{tmp_path}/linked/mine.py:quickstart"):
        assert with_newest_checkpoint(source, config(resume="latest")) == (found, [])
    _, (line,) = with_newest_checkpoint("quickstart", config(resume="latest"))
    assert f"(there are some of {tmp_path}/mine.py:quickstart, which can be named) has no complete" in line
    for other in ("/a.py:quickstart", "quick"):  # of another file, or with a name that begins like it
        _, (line,) = with_newest_checkpoint(other, config(resume="latest"))
        assert f"a run of {other.rpartition(':')[2]} in runs/ " in line
    assert with_newest_checkpoint("x", config(resume="runs/quickstart-1")) == (found, [])
    assert with_newest_checkpoint("x", found) == (found, [])
    (tmp_path / "runs" / "new" / "checkpoints").mkdir(parents=True)
    _, (line,) = with_newest_checkpoint("x", config(resume="runs/new"))
    assert "the run runs/new has no complete checkpoint" in line


def checkpoints(world):
    return sorted(path.name for path in (world.run_dir / "checkpoints").glob("*"))


def end(world, look):
    """The run's error. `look(task, places)` is called at each turn of the loop, with the awaits that tasks are in."""
    tasks = []

    class Loop(VirtualLoop):
        def _run_once(self):
            if tasks and not tasks[0].done():
                look(tasks[0], [place.code for place in waiting(self)])
            super()._run_once()

    async def main():
        tasks.append(asyncio.create_task(world.run()))
        await tasks[0]

    with asyncio.Runner(loop_factory=Loop) as runner:
        try:
            runner.run(main())
        except (RunError, asyncio.CancelledError) as error:
            return error
    return None


def test_the_last_generators_death_costs_no_step_that_is_done(tmp_path):
    world = World(config(save_every=0, max_logprob_diff=1e9), tmp_path)

    def kill(_, places):
        if 2 in world.recorder.steps and any("asyncio.shield(updating)" in place for place in places):
            world.kill("generator", for_good=True)

    assert "every generator has died for good" in str(end(world, kill))
    assert checkpoints(world) == [f"step-{max(world.recorder.steps)}"]


def test_by_turns_the_checkpoint_does_not_wait_for_what_is_sampled(tmp_path):
    """The generators leave at once, as nobody wants their samples any more."""
    world = World(config(save_every=0, max_logprob_diff=1e9, placement="by_turns", steps=9), tmp_path)

    async def main():
        loop, running = asyncio.get_running_loop(), asyncio.create_task(world.run())
        while 2 not in world.recorder.steps:
            await asyncio.sleep(0.01)
        world.slow["generator-0.sample"] = 1e6
        await asyncio.sleep(5)  # it samples, and will for days
        began = loop.time()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return loop.time() - began

    assert run_virtually(main()) < 60  # holds: exact, a clock that is made up
    assert checkpoints(world) == [f"step-{max(world.recorder.steps)}"]


def test_a_second_interrupt_ends_the_run_without_a_checkpoint_where_the_first_one_waits(tmp_path):
    """Here for the episodes of an evaluation to close, which takes long."""
    settings = replace(
        calculator(), env=replace(calculator().env, num_eval=2), warmup=WarmupConfig(), steps=4, eval_every=1,
        prompts_per_step=2, group_size=2, max_logprob_diff=1e9,
    )  # fmt: skip
    world, times = World(settings, tmp_path, slow={"close_episode": 4000, "ask_episode": 30}), []

    def interrupt(task, places):
        now = task.get_loop().time()
        evaluates = any("_rollouts.evaluate(sampler)" in place for place in places)
        in_episode = any("answer = await self._ask" in place for place in places)
        if (not times and 2 in world.recorder.steps and evaluates and in_episode) or (
            len(times) == 1 and now > times[0] + 1.5  # holds: exact, a clock that is made up
        ):
            times.append(now)
            task.cancel()

    assert isinstance(end(world, interrupt), asyncio.CancelledError)
    assert len(times) == 2 and not checkpoints(world)


@pytest.mark.parametrize(
    ("goes_on", "evaluated", "expected"),
    [
        (True, [0], True),
        (True, [0, 2], False),
        (True, [0, 3], False),
        (True, [], True),
        (False, [0, 2], True),
    ],
)
def test_an_evaluation_that_was_interrupted_is_made_up_for(tmp_path, goes_on, evaluated, expected):
    """Of step 2, beside step 3, of which the checkpoint is."""
    settings = config(steps=3, max_offpolicy_steps=1)
    run_fakes(settings, tmp_path)
    checkpoint = str(tmp_path / "checkpoints" / "step-3")
    recorder = QuietRecorder(tmp_path)
    recorder.accuracies = dict.fromkeys(evaluated, (0.5, 0.1))
    actors, _ = fake_actors(settings, tmp_path)
    tokenizer = HFTokenizer(settings.model.materialize(tmp_path))
    learning = learning_of(replace(settings, steps=9))
    schedule = asyncio.run(RunStages(learning, checkpoint, actors, tokenizer, recorder, goes_on).start())
    assert (schedule.first, schedule.evaluate_first) == (4, expected)


def test_what_is_being_written_is_finished_though_an_update_ends_the_run(tmp_path, monkeypatch):
    """As one for which a GPU has not enough memory: the checkpoint of the step before is still on its way."""
    settings = config(save_every=1)
    actors, _ = fake_actors(settings, tmp_path)
    finished, learn = [], stages.learn

    async def learning(batch, step, *rest):
        if step == 3:
            finished.clear()
            raise RunError("out of memory")
        return await learn(batch, step, *rest)

    async def finish_checkpoint():
        finished.append(latest(tmp_path / "checkpoints"))

    monkeypatch.setattr(stages, "learn", learning)
    monkeypatch.setattr(actors.trainer, "finish_checkpoint", finish_checkpoint)
    tokenizer = HFTokenizer(settings.model.materialize(tmp_path))
    run = RunStages(learning_of(settings), "", actors, tokenizer, QuietRecorder(tmp_path)).run()
    with pytest.raises(RunError, match="out of memory"):
        asyncio.run(run)
    assert [path.name for path in finished] == ["step-2"]  # and none of step 3, which is half done


@pytest.mark.parametrize("times", [1, 2])
def test_a_last_checkpoint_that_is_being_written_is_finished_unless_told_twice(tmp_path, times):
    ends, said = [], []

    async def finish_checkpoint():
        try:
            await asyncio.sleep(10)
            ends.append("written")
        except asyncio.CancelledError:
            ends.append("interrupted")
            raise

    async def main():
        actors = SimpleNamespace(trainer=SimpleNamespace(finish_checkpoint=finish_checkpoint))
        finishing = asyncio.create_task(finish_last(actors, SimpleNamespace(say=said.append)))
        for _ in range(times):
            await asyncio.sleep(1)
            finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing

    run_virtually(main())
    assert ends == (["interrupted", "written"] if times == 1 else ["interrupted"] * 2)
    assert len(said) == 1 and "once more to end without it" in said[0]
