"""Trainer, critic or reference die at any call: the run goes on, and its numbers are those of one without the death."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from configs.quickstart import quickstart
from rl.actors.actors import Revival
from rl.actors.remote import EngineDied
from rl.config import CriticConfig, ReferenceConfig, WarmupConfig
from rl.config.learning import learning_of
from rl.controller import recovery
from rl.controller.recovery import train_and_export
from rl.envs.sort_letters import SortLetters
from rl.errors import DamagedCheckpoint, RunError
from rl.loss.advantages.gae import GAE
from rl.loss.entropy import EntropyBonus
from rl.loss.kl import KL
from rl.models.tokenizer import HFTokenizer
from rl.observability import rollout_log
from rl.observability.recorder import Recorder
from rl.observability.sinks import Sinks
from rl.observability.timeline import Timeline
from rl.paths import whole_file
from tests.controller.fakes import FakeEngine, fake_actors

ALGORITHMS = {
    "grpo": {},
    "asynchronous": {"max_offpolicy_steps": 1},
    "streamed": {"stream_groups": 2},
    "a refreshed reference": {"kl": KL(coef=0.1), "reference": ReferenceConfig(refresh_every=1)},
    "a critic": {"advantages": GAE(), "critic": CriticConfig()},
}
MAY_DIFFER = ("time/", "idle/", "buffer/")


def config(**changes):
    base = replace(
        quickstart(), env=SortLetters(num_eval=2), warmup=WarmupConfig(steps=1, batch_size=2), steps=5, save_every=2,
        prompts_per_step=4, group_size=3, eval_every=2, entropy=EntropyBonus(target=9.0),
    )  # fmt: skip
    return replace(base, **changes)


class Mortal:
    """Has a fake engine die at the n-th of all calls, with what it has learned."""

    def __init__(self, monkeypatch, deaths):
        self.deaths, self.num_calls = set(deaths), 0
        for name in ("forward", "forward_backward", "optim_step", "publish_weights", "save_checkpoint", "save_hf",
                     "load_checkpoint", "finish_checkpoint"):  # fmt: skip
            monkeypatch.setattr(FakeEngine, name, self.wrap(name, getattr(FakeEngine, name)))

    def wrap(self, name, method):
        async def call(engine, *arguments, **options):
            self.num_calls += 1
            if self.num_calls in self.deaths:
                raise EngineDied(f"the process of the {engine.name} died in {name}")
            return await method(engine, *arguments, **options)

        return call


def run(settings, directory, max_restarts=3, goes_on=False):
    """What was recorded, the number of the trainer's updates at the end, and how often it was started again."""
    directory.mkdir(parents=True, exist_ok=True)
    actors, _ = fake_actors(settings, directory)
    engines = [actors.trainer, *([actors.critic] if actors.critic else [])]

    async def start():
        for engine in engines:
            engine.updates, engine._bad = 0, False

    revival = Revival(start, engines, max_restarts)
    actors = replace(actors, revival=revival)
    tokenizer = HFTokenizer(settings.model.materialize(directory))

    async def main():
        async with Recorder(directory, settings.steps, Timeline(), Sinks({})) as recorder:
            await train_and_export(
                learning_of(settings), settings.resume, actors, tokenizer, recorder, goes_on
            )

    asyncio.run(main())
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    numbers = [{n: v for n, v in line.items() if not n.startswith(MAY_DIFFER)} for line in lines]
    rollouts = (directory / "rollouts.jsonl").read_text()
    return numbers, rollouts, actors.trainer.updates, revival.num_restarts


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_death_at_any_call_changes_no_number(name, tmp_path, monkeypatch):
    settings = config(**ALGORITHMS[name])
    with monkeypatch.context() as patch:
        mortal = Mortal(patch, ())
        *expected, updates, restarts = run(settings, tmp_path / "whole")
    assert not restarts
    for death in range(1, mortal.num_calls + 1, 3):
        with monkeypatch.context() as patch:
            Mortal(patch, [death])
            *got, again, restarts = run(settings, tmp_path / str(death))
        assert restarts == 1, death
        assert again == updates
        if not settings.max_offpolicy_steps:
            assert got == expected, death
        steps = [line["step"] for line in got[0] if "loss" in line]
        assert steps == list(range(1, settings.steps + 1))


def test_a_death_while_rollouts_are_written_costs_no_file(tmp_path, monkeypatch):
    """What an earlier life left half written is removed after it, too, and these the run's own thread still writes."""

    @contextmanager
    def slow(*arguments, **options):
        with whole_file(*arguments, **options) as file:
            yield file
            time.sleep(0.3)

    monkeypatch.setattr(rollout_log, "whole_file", slow)
    settings = config(save_every=1)
    step, died = FakeEngine.optim_step, []

    async def die_once(engine, *arguments, **options):
        if engine.updates == 3 and not died:
            died.append(engine.name)
            raise EngineDied("the trainer died")
        return await step(engine, *arguments, **options)

    monkeypatch.setattr(FakeEngine, "optim_step", die_once)
    *_, restarts = run(settings, tmp_path)
    assert restarts == 1
    written = {path.name for path in (tmp_path / "rollouts").iterdir()}
    assert written >= {f"train-{number}.jsonl.gz" for number in range(1, settings.steps + 1)}
    assert not [name for name in written if name.endswith(".partial")]


def test_one_that_dies_over_and_over_is_given_up(tmp_path, monkeypatch):
    Mortal(monkeypatch, range(20, 1000))
    with pytest.raises(RunError, match="died in .*; no restart is left of trainer.max_restarts=2"):
        run(config(), tmp_path, max_restarts=2)


def test_restarts_are_counted_anew_with_each_checkpoint(tmp_path, monkeypatch):
    """A run of weeks is not ended by its fourth death if it has got further each time."""
    settings = config(save_every=1)
    with monkeypatch.context() as patch:
        Mortal(patch, ())
        *expected, updates, _ = run(settings, tmp_path / "whole")
    save, learn, saved, died = FakeEngine.save_checkpoint, FakeEngine.forward_backward, [], []

    async def save_and_note(engine, path, *arguments, **options):
        await save(engine, path, *arguments, **options)
        saved.append(Path(path).name)

    async def learn_once_from_there(engine, *arguments, **options):
        if saved and saved[-1] not in died:
            died.append(saved[-1])
            raise EngineDied(f"the process of the {engine.name} died in forward_backward")
        return await learn(engine, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "save_checkpoint", save_and_note)
        patch.setattr(FakeEngine, "forward_backward", learn_once_from_there)
        *got, again, restarts = run(settings, tmp_path / "run", max_restarts=1)
    assert died == ["step-1", "step-2", "step-3", "step-4"] and restarts == 4
    assert (got, again) == (expected, updates)


def test_a_run_that_began_at_another_run_s_checkpoint_evaluates_it_once(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        Mortal(patch, ())
        run(config(steps=2), tmp_path / "first")
    settings = config(resume=str(tmp_path / "first" / "checkpoints" / "step-2"), save_every=0)
    with monkeypatch.context() as patch:
        mortal = Mortal(patch, ())
        *expected, _, _ = run(settings, tmp_path / "whole")
    for death in range(2, mortal.num_calls - 3, 2):
        with monkeypatch.context() as patch:
            Mortal(patch, [death])
            *got, _, restarts = run(settings, tmp_path / str(death))
        assert restarts == 1 and got == expected, death


@pytest.mark.parametrize("damaged", [[4], [2, 4]])
def test_where_the_newest_checkpoint_is_damaged_too_an_older_one_does(damaged, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        mortal = Mortal(patch, ())
        *expected, updates, _ = run(config(), tmp_path / "whole")
    save = FakeEngine.save_checkpoint

    async def save_and_damage(engine, path, *arguments, **options):
        await save(engine, path, *arguments, **options)
        if int(path.rpartition("-")[2]) in damaged and not (tmp_path / "run" / "abandoned").exists():
            (Path(path) / "record.json").write_text("{")

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "save_checkpoint", save_and_damage)
        Mortal(patch, [mortal.num_calls - 5])  # in step 5
        *got, again, restarts = run(config(), tmp_path / "run")
    assert (got, again, restarts) == (expected, updates, 1)
    assert "step-4 is passed over" in caplog.text
    branch = tmp_path / "run" / "abandoned" / "1" / "checkpoints"
    assert sorted(path.name for path in branch.iterdir()) == [f"step-{step}" for step in damaged]


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_left_behind_is_copied_by_the_thread_that_writes(damaged, tmp_path, monkeypatch):
    """After all that was recorded before, and not in the loop, which a large file would hold up."""
    threads, move = [], recovery.abandon_after

    def abandon_after(run_dir, step):
        threads.append(threading.current_thread())
        return move(run_dir, step)

    monkeypatch.setattr(recovery, "abandon_after", abandon_after)
    load = FakeEngine.load_checkpoint

    async def load_checkpoint(engine, path):
        if damaged and path.endswith("step-4"):
            raise DamagedCheckpoint(f"{path} is broken")
        return await load(engine, path)

    monkeypatch.setattr(FakeEngine, "load_checkpoint", load_checkpoint)
    with monkeypatch.context() as patch:
        mortal = Mortal(patch, ())
        run(config(), tmp_path / "whole")
    threads.clear()
    Mortal(monkeypatch, [mortal.num_calls - 5])
    run(config(), tmp_path / "run")
    assert len(threads) == (3 if damaged else 1)
    assert threading.main_thread() not in threads


def test_where_every_critic_s_part_is_damaged_the_policy_begins_again_too(tmp_path, monkeypatch):
    """Each policy has been loaded by the time that its critic's damage shows."""
    settings = config(**ALGORITHMS["a critic"], keep_checkpoints=0)
    expected, _, updates, _ = run(settings, tmp_path)
    for parts in ("checkpoints", "critic_checkpoints"):
        kept = {path.name for path in (tmp_path / parts).iterdir()}
        assert kept == {"step-2", "step-4", "step-5"}
    load = FakeEngine.load_checkpoint

    async def load_checkpoint(engine, path):
        if engine.name == "critic":
            raise DamagedCheckpoint(f"{path} is broken")
        return await load(engine, path)

    monkeypatch.setattr(FakeEngine, "load_checkpoint", load_checkpoint)
    resumed = replace(settings, resume=str(tmp_path / "checkpoints" / "step-5"))
    got, _, updates_again, restarts = run(resumed, tmp_path, goes_on=True)
    steps, steps_again = ([line for line in lines if "loss" in line] for lines in (expected, got))
    assert steps_again == steps and [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert (updates_again, restarts) == (updates, 1)
