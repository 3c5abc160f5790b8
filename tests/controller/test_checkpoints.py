"""A checkpoint's parts: whatever happens to a run, each complete checkpoint finds what it notes."""

import asyncio
import errno
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from configs.quickstart import quickstart
from rl.actors.reference import ReferenceMesh
from rl.controller.checkpoints import begin_at_policy, load_checkpoint, refresh_reference, save_checkpoint
from rl.errors import RunError
from rl.loss.advantages.gae import GAE
from rl.loss.kl import KL
from rl.models.checkpoint_dir import critic_path, is_complete, prune, read_record, rename
from tests.controller.fakes import FakeEngine, fake_actors

SETTINGS = replace(quickstart(), kl=KL(coef=0.1))


class Killed(Exception):
    pass


class Policy(FakeEngine):
    """Writes a checkpoint until `finish`, as the writing thread does; what it exports says what it is."""

    weights = 0  # what it has learned

    async def save_hf(self, out_dir, adapter=None):
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        (Path(out_dir) / "weights").write_text(str(self.weights))

    async def save_checkpoint(self, path, state, keep_last, wait=False):
        self.finish()
        partial = Path(f"{path}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        (partial / "record.json").write_text(json.dumps({"state": state, "updates": self.updates}))
        self.writing = partial, Path(path), keep_last

    writing, is_killed = None, False

    async def finish_checkpoint(self):
        self.finish()

    def finish(self):
        if self.is_killed:
            raise Killed
        if self.writing is not None:
            partial, path, keep_last = self.writing
            (partial / ".metadata").touch()
            rename(partial, path)
            prune(path, keep_last)
        self.writing = None


class Reference(FakeEngine):
    weights = "0"

    async def load_weights(self, model_dir):
        self.weights = (Path(model_dir) / "weights").read_text()


class Run:
    """One life after another in a directory."""

    def __init__(self, run_dir, keep_last):
        self.run_dir, self.keep_last, self.step = run_dir, keep_last, 0
        self.begin()

    def begin(self):
        actors, calls = fake_actors(SETTINGS, self.run_dir)
        self.trainer = Policy("trainer", calls, actors.trainer.config)
        self.engine = Reference("reference", calls, actors.trainer.config)
        mesh = ReferenceMesh(self.engine, self.trainer, self.run_dir)
        self.actors = replace(actors, trainer=self.trainer, reference=mesh)

    def complete(self):
        return [path for path in (self.run_dir / "checkpoints").glob("step-*") if is_complete(path)]

    async def learn(self):
        self.step += 1
        self.trainer.weights = random.getrandbits(60)

    async def refresh(self):
        await refresh_reference(self.actors, self.run_dir, self.step)

    async def save(self):
        path = self.run_dir / "checkpoints" / f"step-{self.step}"
        state = {"step": self.step, "learned": self.engine.weights}
        await save_checkpoint(self.actors, path, state, "policy", self.keep_last)

    async def refresh_and_save(self):
        await self.refresh()
        await self.save()

    async def written(self):
        self.trainer.finish()

    async def resume(self):
        """A new process, from any checkpoint; what was being written stays half there."""
        self.begin()
        complete = self.complete()
        await self.load(random.choice(complete) if complete else "")

    async def die(self):
        """Of the trainer; the reference is started again with it."""
        self.trainer.writing, self.engine.weights = None, "0"
        await self.load(max(self.complete(), key=lambda path: int(path.name[5:]), default=""))

    async def load(self, path):
        self.step = (await load_checkpoint(self.actors, str(path)))["step"]

    def check(self):
        for checkpoint in self.complete():
            record = json.loads((checkpoint / "record.json").read_text())
            if noted := record["state"]["reference"][1]:
                assert (Path(noted) / "weights").read_text() == record["state"]["learned"]
        references = self.run_dir / "reference"
        kept = len(list(references.iterdir())) if references.exists() else 0
        # its own, and one for each that is complete, is being written or was left half written
        assert kept <= len(list((self.run_dir / "checkpoints").glob("step-*"))) + 2


class Critic(FakeEngine):
    async def save_checkpoint(self, path, state, keep_last, wait=False):
        assert wait
        Path(path).mkdir(parents=True)
        (Path(path) / "record.json").write_text(json.dumps({"state": state}))
        (Path(path) / ".metadata").touch()
        prune(Path(path), keep_last)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_who_is_killed_while_a_checkpoint_is_written_has_one_with_its_critic(keep_last, tmp_path):
    """The next one is due before the one before is complete."""
    run = Run(tmp_path, keep_last)
    run.actors = replace(run.actors, engines={"critic": Critic("critic", [], run.trainer.config)})

    async def live():
        for _ in range(3):
            await run.learn()
            await run.save()
        await run.learn()
        run.trainer.is_killed = True
        with pytest.raises(Killed):
            await run.save()

    (tmp_path / "checkpoints").mkdir()
    asyncio.run(live())
    complete = run.complete()
    assert len(complete) == min(keep_last, 2)
    assert all(is_complete(critic_path(path)) for path in complete)


EVENTS = ("learn", "learn", "refresh", "save", "refresh_and_save", "written", "written", "resume", "die")


@pytest.mark.parametrize("seed", range(20))
def test_each_complete_checkpoint_finds_the_reference_that_it_notes(seed, tmp_path):
    random.seed(seed)
    run = Run(tmp_path, keep_last=seed % 4)

    async def live():
        for _ in range(60):
            await getattr(run, random.choice(EVENTS))()
            run.check()

    (tmp_path / "checkpoints").mkdir()
    asyncio.run(live())


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_goes_on_from_another_s_checkpoint_needs_nothing_of_the_other(seed, tmp_path):
    """The other goes on, too, and removes what its own checkpoints no longer note; then all of it goes."""
    random.seed(seed)
    first, second = (Run(tmp_path / name, keep_last=1) for name in ("first", "second"))

    async def live():
        for event in ("learn", "refresh", "learn", "save", "written"):
            await getattr(first, event)()
        origin = first.complete()[0]
        reference = first.engine.weights
        await second.load(origin)
        assert second.engine.weights == reference
        for event in ("learn", "save", "written"):
            await getattr(second, event)()
        for event in ("learn", "refresh_and_save", "written", "learn", "refresh_and_save", "written"):
            await getattr(first, event)()
        second.check()
        shutil.rmtree(tmp_path / "first")
        for _ in range(20):
            await getattr(second, random.choice(["learn", "save", "written", "die", "resume"]))()
            second.check()
            assert second.engine.weights == reference
        assert len(list((tmp_path / "second" / "reference").iterdir())) == 1

    for run in (first, second):
        (run.run_dir / "checkpoints").mkdir(parents=True)
    asyncio.run(live())


def test_a_run_that_dies_before_its_first_checkpoint_copies_the_other_s_reference_again(tmp_path):
    first, second = (Run(tmp_path / name, keep_last=1) for name in ("first", "second"))

    async def live():
        for event in ("learn", "refresh", "save", "written"):
            await getattr(first, event)()
        (origin,) = first.complete()
        await second.load(origin)
        await second.refresh()  # the copy goes: no checkpoint notes it
        await second.load(origin)
        await second.load(origin)
        await second.save()
        await second.written()
        shutil.rmtree(tmp_path / "first")
        second.check()

    for run in (first, second):
        (run.run_dir / "checkpoints").mkdir(parents=True)
    asyncio.run(live())


def test_a_record_that_cannot_be_read_just_now_keeps_the_reference_that_it_notes(tmp_path, monkeypatch):
    run = Run(tmp_path, keep_last=0)
    read = Path.read_text

    def failing(path, *arguments):
        if path.name == "record.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path, *arguments)

    async def live():
        for event in ("learn", "refresh", "save", "written", "learn", "refresh"):
            await getattr(run, event)()
        await run.learn()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", failing)
            await run.refresh()
        run.check()
        assert {path.name for path in (tmp_path / "reference").iterdir()} == {"step-1", "step-2", "step-3"}

    (tmp_path / "checkpoints").mkdir()
    asyncio.run(live())


def test_a_copy_that_a_kill_cut_short_is_made_again(tmp_path, monkeypatch):
    first, second = (Run(tmp_path / name, keep_last=1) for name in ("first", "second"))
    rename = Path.rename

    def dying(path, target):
        if path.parent.name == "reference":
            raise Killed
        return rename(path, target)

    async def live():
        for event in ("learn", "refresh", "save", "written"):
            await getattr(first, event)()
        (origin,) = first.complete()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Path, "rename", dying)
            await second.load(origin)
        second.begin()
        await second.load(origin)
        assert second.engine.weights == first.engine.weights
        assert len(list((tmp_path / "second" / "reference").iterdir())) == 1

    for run in (first, second):
        (run.run_dir / "checkpoints").mkdir(parents=True)
    asyncio.run(live())


def test_a_run_that_begins_again_notes_no_reference_of_its_earlier_life(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    run = Run(tmp_path, keep_last=2)

    async def live():
        for event in ("learn", "refresh", "die", "learn", "save", "written"):
            await getattr(run, event)()
            run.check()

    asyncio.run(live())


@pytest.mark.parametrize("teacher", [False, True])
def test_after_a_warm_up_critic_and_reference_are_the_policy_and_a_teacher_is_not(teacher, tmp_path):
    actors, calls = fake_actors(replace(SETTINGS, advantages=GAE()), tmp_path)
    asyncio.run(begin_at_policy(actors, tmp_path, teacher=teacher))
    taken = {(who, what[0]) for who, verb, *what in calls if verb == "load_weights"}
    assert taken == {("critic", "hf")} | (set() if teacher else {("reference", "step-0")})
    assert not (tmp_path / "warm_start").exists()


def test_what_is_no_complete_checkpoint_is_named(tmp_path):
    (tmp_path / "step-3.partial").mkdir()
    for name in ("step-3.partial", "step-4"):
        with pytest.raises(RunError, match=f"{name} is not a complete checkpoint; give another, as"):
            read_record(tmp_path / name)
