"""Going on in place from an older step: the later ones are left behind, whole, and nothing takes them for newer."""

import errno
import json
import os
import pickle
import random
import shutil
import uuid
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from configs.quickstart import quickstart
from rl.actors.actors import Revival
from rl.actors.remote import EngineDied
from rl.cluster import hosts
from rl.config import ReferenceConfig, WarmupConfig
from rl.config.rehearsal import Rehearsal
from rl.controller import abandoned
from rl.controller import run as running
from rl.controller.abandoned import abandon_after, remove_unfinished
from rl.controller.origin import drop_origin
from rl.envs.sort_letters import SortLetters
from rl.errors import ConfigError, DamagedCheckpoint, RunError
from rl.loss.advantages.gae import GAE
from rl.loss.kl import KL
from rl.models.checkpoint_dir import RECORD, latest, newest_first, prune, rename
from rl.observability.recorder import Recorder
from tests.controller.fakes import FakeEngine, fake_actors, no_picture
from tests.plans import AMPLE

DAMAGES = {
    "a quick look shows it": lambda path: (path / "record.json").write_text("{"),
    "only loading it shows it": lambda path: (path / "a flipped byte").touch(),
}
STRANGERS = ("notes.txt", "checkpoints/mine", "checkpoints/step-best", "held/notes.pkl", "batches/step-9.pkl.old",
             "rollouts/my-notes.jsonl.gz", "checkpoints/step-9.partial/theirs", "critic_checkpoints/step-x.partial/f")  # fmt: skip


class Interrupted(Exception):
    pass


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A run in tmp_path/run with fakes for actors; `until`: the step in whose update it is killed; `dies`: its
    trainer, in the update of this number, when the directory `other` goes; in that of number 0, it goes as processes
    start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        hosts, "look_at_host", lambda: AMPLE.hosts[0]
    )  # one core has no room for five processes
    step_once, load = FakeEngine.optim_step, FakeEngine.load_checkpoint

    def train(resume="", until=None, settings=None, dies=None, **changes):
        settings, deaths = settings or quickstart(), []
        config = replace(
            settings, env=SortLetters(num_eval=2), warmup=WarmupConfig(), prompts_per_step=2, group_size=2,
            save_every=2, eval_every=100, run_dir="run", resume=str(resume), **changes,
        )  # fmt: skip

        @asynccontextmanager
        async def launch(plan, models, run_dir, env, timeline, **_):
            actors, _ = fake_actors(config, run_dir)

            async def start():
                actors.trainer.updates = 0

            if dies == 0:
                shutil.rmtree("other")

            yield replace(actors, revival=Revival(start, [actors.trainer], 3))

        async def optim_step(engine, params, adapter=None):
            if engine.name == "trainer" and engine.updates + 1 == until:
                raise Interrupted
            if engine.name == "trainer" and engine.updates + 1 == dies and not deaths:
                deaths.append(dies)
                shutil.rmtree("other")
                raise EngineDied("the trainer died")
            return await step_once(engine, params, adapter)

        async def load_checkpoint(engine, path):
            if (Path(path) / "a flipped byte").exists():
                raise DamagedCheckpoint(f"{path}/a flipped byte is broken: it is not what was written")
            return await load(engine, path)

        monkeypatch.setattr(FakeEngine, "optim_step", optim_step)
        monkeypatch.setattr(FakeEngine, "load_checkpoint", load_checkpoint)
        monkeypatch.setattr(running, "launch", launch)
        # Of each run a second, and no test's subject: a process for the rewards, and a picture.
        monkeypatch.setattr(running, "rehearse", lambda *_: Rehearsal())
        monkeypatch.setattr(Recorder, "draw_curve", no_picture)
        try:
            return running.run("quickstart", config)
        except Interrupted:
            return None

    return train


def steps(directory="run"):
    return sorted(int(path.name[5:]) for path in (Path(directory) / "checkpoints").glob("step-*"))


def test_who_goes_on_from_an_older_step_goes_on_from_there_the_next_time_too(train, capsys):
    train(steps=6)
    assert steps() == [4, 6]
    before = Path("run/metrics.jsonl").read_text()
    train("run/checkpoints/step-4", steps=8, until=6)
    assert (
        "step-6 of run went to run/abandoned/1; going on from run/checkpoints/step-4"
        in capsys.readouterr().out
    )
    assert steps() == [4] and steps("run/abandoned/1") == [6]
    train("latest", steps=8)  # at step 4, not 6: both steps come again
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert steps() == [6, 8] and steps("run/abandoned/1") == [6]
    assert Path("run/abandoned/1/metrics.jsonl").read_text() == before
    assert not Path("run/abandoned/2").exists()


@pytest.mark.parametrize("parts", [{}, {"advantages": GAE(), "kl": KL(coef=0.1)}], ids=["the policy", "all"])
def test_what_a_run_began_from_stays_until_its_end(parts, train):
    """Though the other run removes it, as it does once it has newer ones."""
    train(steps=4, **parts)
    put(Path("run/model/model.safetensors"))  # random weights are drawn by a real engine
    Path("run").rename("other")
    train("other/checkpoints/step-4", steps=8, **parts)
    whole = recorded()
    shutil.rmtree("run")
    train("other/checkpoints/step-4", steps=8, until=5, **parts)
    files = [path for path in Path("run/origin").rglob("*") if path.is_file()]
    assert files and all(path.stat().st_nlink == 2 for path in files)  # no byte of it twice
    kinds = {path.relative_to("run/origin").parts[0] for path in files}
    assert kinds == {"checkpoints", "config.json", "plan.json", "model"} | (
        {"critic_checkpoints"} if parts else set()
    )
    shutil.rmtree("other")
    train("latest", steps=8, until=5, **parts)
    train("latest", steps=8, until=7, **parts)  # saved as step-6
    train("latest", steps=8, **parts)
    assert recorded() == whole and not Path("run/origin").exists()


def gone_on_from_another(train, **parts):
    """What a run records that goes on from step 4 of another, which lies in `other`, while nothing happens."""
    train(steps=4, **parts)
    Path("run").rename("other")
    train("other/checkpoints/step-4", steps=8, **parts)
    whole = recorded()
    shutil.rmtree("run")
    return whole


def test_an_engine_that_dies_goes_on_from_the_origin_though_the_other_run_has_removed_it(train):
    whole = gone_on_from_another(train)
    assert train("other/checkpoints/step-4", steps=8, dies=5) == 0
    assert recorded() == whole and not Path("other").exists()


def test_the_other_run_may_remove_what_a_run_begins_from_while_its_processes_start(train):
    parts = {"advantages": GAE(), "kl": KL(coef=0.1)}
    whole = gone_on_from_another(train, **parts)
    assert train("other/checkpoints/step-4", steps=8, dies=0, **parts) == 0
    assert recorded() == whole


def test_a_run_whose_own_checkpoint_is_damaged_still_has_what_it_began_from(train):
    """Also where only loading shows it."""
    whole = gone_on_from_another(train)
    train("other/checkpoints/step-4", steps=8, until=7)
    shutil.rmtree("other")
    (Path("run/checkpoints/step-6") / "a flipped byte").touch()
    assert train("latest", steps=8) == 0
    assert recorded() == whole and not Path("run/origin").exists()


@pytest.mark.parametrize("resume", ["other/checkpoints/step-4", "other"])
def test_a_damaged_checkpoint_of_another_run_is_told_by_its_own_name(resume, train):
    """Though it is read where this run has it."""
    train(steps=4)
    Path("run").rename("other")
    (Path("other/checkpoints/step-4") / "a flipped byte").touch()
    with pytest.raises(DamagedCheckpoint) as refused:
        train(resume, steps=8)
    text = str(refused.value)
    assert f"as {Path('other/checkpoints/step-4').absolute()} is; go on with --resume" in text, text
    assert text.endswith(str(Path("other/checkpoints/step-2").absolute()))


def test_a_run_that_is_killed_before_its_first_checkpoint_has_one_copy_of_the_other_s_reference(train):
    parts = {"kl": KL(coef=0.1), "reference": ReferenceConfig(refresh_every=2)}
    train(steps=4, **parts)
    Path("run").rename("other")
    train("other/checkpoints/step-4", steps=8, until=5, **parts)
    train("latest", steps=8, until=5, **parts)
    assert len(list(Path("run/reference").iterdir())) == 1


def test_whoever_is_killed_while_the_origin_is_removed_has_it_whole_or_not_at_all(tmp_path, monkeypatch):
    def prepare(number):
        run_dir = tmp_path / str(number)
        checkpoint(run_dir / "checkpoints" / "step-6", 6)
        checkpoint(run_dir / "origin" / "checkpoints" / "step-4", 4)
        put(run_dir / "origin" / "config.json")
        return run_dir

    expected = files(prepare("whole") / "origin")
    for run_dir in every_kill(monkeypatch, prepare, drop_origin):
        assert not (run_dir / "origin").exists() or files(run_dir / "origin") == expected
        drop_origin(run_dir)
        assert [path.name for path in run_dir.iterdir()] == ["checkpoints"]


def test_what_a_branch_has_of_all_steps_is_on_the_disk_before_the_run_s_own_is_cut(tmp_path, monkeypatch):
    make(tmp_path, random.Random(0))
    synced, rename = set(), Path.rename
    fsync = os.fsync

    def note_sync(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def note_rename(path, target):
        if path.name == "1.partial":
            kept = [
                path,
                *path.glob("*"),
                *(tmp_path / part.name for part in path.iterdir() if part.is_dir()),
            ]
            assert len(kept) > 4 and not [p for p in kept if p.stat().st_ino not in synced]
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    assert abandon_after(tmp_path, 10)
    assert (tmp_path / "abandoned").stat().st_ino in synced


@pytest.mark.parametrize("writes", ["write_config", "abandon_after", "lock_directory"])
def test_a_disk_that_is_full_as_a_run_goes_on_is_no_reason_to_begin_another(writes, train, monkeypatch):
    train(steps=4)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(running, writes, full)
    with pytest.raises(RunError, match=r"is full; make room; go on with --resume run/checkpoints/step-4$"):
        train("latest", steps=6)


def test_an_origin_that_is_half_linked_is_linked_again(train, monkeypatch):
    train(steps=4)
    Path("run").rename("other")
    link, left = os.link, [1]

    def dying(*paths, **options):
        if not left[0]:
            raise Interrupted
        left[0] -= 1
        return link(*paths, **options)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(os, "link", dying)
        running.keep_origin("other/checkpoints/step-4", Path("run"))
    assert not Path("run/origin").exists() and Path("run/origin.partial").exists()
    running.keep_origin("other/checkpoints/step-4", Path("run"))
    assert latest(Path("run/origin/checkpoints")) and not Path("run/origin.partial").exists()


def test_an_origin_on_another_disk_is_not_kept_and_the_run_says_so(train, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    train(steps=4)
    Path("run").rename("other")
    monkeypatch.setattr(os, "link", refuse)
    train("other/checkpoints/step-4", steps=8, until=5)
    printed = capsys.readouterr().out
    assert "step-4 is not linked into run ([Errno 18] Invalid cross-device link); leave it until" in printed
    assert not Path("run/origin").exists() and not Path("run/origin.partial").exists()
    assert train("latest", steps=8) == 0


@pytest.mark.parametrize("name", ["best-99", "step-4-99", "99", "step-x9"])
def test_a_copy_under_another_name_is_nobodys_newest_checkpoint(name, train):
    """It was taken for the newest, of step 0: every other was moved to abandoned/."""
    train(steps=4, keep_checkpoints=0)
    shutil.copytree("run/checkpoints/step-2", f"run/checkpoints/{name}")
    assert latest("run/checkpoints").name == "step-4"
    train("latest", steps=6, keep_checkpoints=0)
    assert all(Path(f"run/checkpoints/step-{step}").is_dir() for step in (2, 4, 6))
    assert Path(f"run/checkpoints/{name}/record.json").is_file() and not Path("run/abandoned").exists()


@pytest.mark.parametrize("name", ["step-4.partial", "step-4.old.partial"])
def test_latest_goes_on_from_a_checkpoint_that_lacked_only_its_name(name, train):
    train(steps=4)
    Path("run/checkpoints/step-4").rename(f"run/checkpoints/{name}")
    train("latest", steps=6)
    assert steps() == [4, 6] and not Path("run/abandoned").exists()


def test_a_branch_has_the_critic_s_part_and_a_new_run_can_go_on_from_it(train):
    train(steps=6, advantages=GAE())
    train("run/checkpoints/step-4", steps=8, until=6, advantages=GAE())
    branch = Path("run/abandoned/1")
    assert sorted(path.name for path in branch.iterdir()) == [
        "checkpoints", "config.json", "critic_checkpoints", "held", "metrics.jsonl", "rollouts", "rollouts.jsonl",
    ]  # fmt: skip
    assert not list(Path("run/critic_checkpoints").glob("step-6"))
    Path("run").rename("other")
    assert train("other/abandoned/1/checkpoints/step-6", steps=7, advantages=GAE()) == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_latest_goes_on_from_the_newest_good_checkpoint_and_says_so(damage, train, capfd, caplog):
    train(steps=6, keep_checkpoints=0)
    whole = recorded()
    for step in (4, 6):
        DAMAGES[damage](Path(f"run/checkpoints/step-{step}"))
    with pytest.raises((ConfigError, RunError), match="is broken"):  # the user named this one
        train("run/checkpoints/step-6", steps=6, keep_checkpoints=0)
    assert steps() == [2, 4, 6]
    train("latest", steps=6, keep_checkpoints=0)
    told = capfd.readouterr().out + caplog.text
    assert "step-4" in told and "is broken" in told and "going on from run/checkpoints/step-2" in told
    assert steps() == [2, 4, 6] and recorded() == whole
    abandoned_steps = [step for branch in Path("run/abandoned").iterdir() for step in steps(branch)]
    assert sorted(abandoned_steps) == [4, 6]
    for step in (2, 4, 6):
        DAMAGES[damage](Path(f"run/checkpoints/step-{step}"))
    train("latest", steps=6, keep_checkpoints=0)
    assert recorded() == whole


def recorded():
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["reward/mean"]) for line in lines if "loss" in line]


def put(path, content="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def files(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def make(run_dir, rng):
    """A run's directory with any of its parts for any steps, and things that are not the run's."""
    for name in STRANGERS:
        put(run_dir / name)
    for name in ("config.json", "metrics.jsonl", "rollouts.jsonl"):
        put(run_dir / name, str(rng.random()))
    for step in rng.sample(range(30), 12):
        for part in rng.sample(("checkpoints", "critic_checkpoints", "held", "batches", "rollouts"), 3):
            name = {"held": "step-{}.pkl", "batches": "step-{}.pkl", "rollouts": "train-{}.jsonl.gz"}
            path = run_dir / part / name.get(part, "step-{}").format(step)
            if part.endswith("checkpoints"):
                put(path / ".metadata")
                put(path / "record.json", json.dumps({"state": {"step": step}}))
            else:
                put(path, str(rng.random()))


@pytest.mark.parametrize("seed", range(20))
def test_everything_of_later_steps_moves_and_nothing_else_even_when_killed_half_way(
    seed, tmp_path, monkeypatch
):
    rng = random.Random(seed)
    make(tmp_path, rng)
    before, step = files(tmp_path), rng.randrange(30)
    rename, left = Path.rename, [rng.randrange(12)]

    def dying(path, target):
        if not left[0]:
            raise Interrupted
        left[0] -= 1
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with suppress(Interrupted):
            abandon_after(tmp_path, step)
    abandon_after(tmp_path, step)
    assert not abandon_after(tmp_path, step)
    after = files(tmp_path)
    branches = [path for path, _, _ in abandoned.abandoned(tmp_path)]
    assert len(branches) <= 1
    moved = {path: content for branch in branches for path, content in files(branch).items()}
    stayed = {path: content for path, content in after.items() if path.parts[0] != "abandoned"}
    assert moved | stayed == before
    assert all(str(name) in map(str, stayed) for name in STRANGERS)
    if branches:
        assert (moved.keys() & stayed.keys()) == {
            Path(n) for n in ("config.json", "metrics.jsonl", "rollouts.jsonl")
        }
    for part in ("checkpoints", "critic_checkpoints"):
        there = [path.name for path in (tmp_path / part).glob("step-*")]
        numbers = [int(name[5:]) for name in there if name[5:].isdecimal()]
        assert not branches or max(numbers, default=0) <= step
    newest = latest(tmp_path / "checkpoints") if branches else None
    assert newest is None or int(newest.name[5:]) <= step


def test_what_an_earlier_life_left_half_written_goes_and_a_stranger_s_stays(tmp_path):
    record = json.dumps({"state": {"step": 7}})
    own = ("checkpoints/step-7.partial", "checkpoints/step-7.old.partial", "critic_checkpoints/step-7.partial",
           "critic_checkpoints/step-7")  # fmt: skip
    for name in own:
        put(tmp_path / name / "record.json", record)
        put(tmp_path / name / "__0_0.distcp")
    (tmp_path / "checkpoints/step-8.partial").mkdir()  # it was killed before it wrote a file
    put(tmp_path / "checkpoints/step-9.partial/record.json.partial", record[:5])
    put(tmp_path / "checkpoints/step-6/record.json", '{"state": {"step": 6}}')
    drawn = f"model.safetensors.{uuid.uuid4().hex}.partial"
    put(tmp_path / "model" / drawn)
    put(tmp_path / "teacher" / "model" / drawn)
    for name in ("held/step-7.pkl.partial", "batches/step-7.pkl.partial", "rollouts/train-7.jsonl.gz.partial",
                 "model/model.safetensors.partial", "reference/step-0-from-01234567.partial/weights"):  # fmt: skip
        put(tmp_path / name)
    theirs = ("model/model.safetensors", "model/mine.partial", "checkpoints/step-1.partial/mine",
              "checkpoints/best.partial/record.json", "critic_checkpoints/step-8/mine", "checkpoints/step-5.partial/record.json",
              "held/mine.pkl.partial", "reference/mine.partial/weights", "rollouts/mine.jsonl.gz.partial")  # fmt: skip
    for name in theirs:
        put(tmp_path / name, record)
    remove_unfinished(tmp_path)
    assert {str(path) for path in files(tmp_path)} == {*theirs, "checkpoints/step-6/record.json"}
    assert not (tmp_path / "checkpoints/step-8.partial").exists()


def checkpoint(path, step, content="new"):
    """A complete one, of a few files."""
    put(path / "record.json", json.dumps({"state": {"step": step}, "content": content}))
    put(path / "__0_0.distcp")
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))


def killed_at(patch, number, names=("rename", "unlink", "rmdir")):
    """From now on the process is killed before its `number`-th change to a directory."""
    left = [number]

    def dying(change):
        def call(*arguments, **options):
            if not left[0]:
                raise Interrupted
            left[0] -= 1
            return change(*arguments, **options)

        return call

    for name in names:
        patch.setattr(os, name, dying(getattr(os, name)))
    scan = os.scandir

    def record_first(path="."):
        """The worst of the orders that a directory may have."""
        with scan(path) as entries:
            return nullcontext(sorted(entries, key=lambda entry: entry.name != RECORD))

    patch.setattr(os, "scandir", record_first)


def every_kill(monkeypatch, prepare, change):
    """A directory for each change at which the process may be killed."""
    for number in range(40):
        run_dir, is_whole = prepare(number), False
        with monkeypatch.context() as patch, suppress(Interrupted):
            killed_at(patch, number)
            change(run_dir)
            is_whole = True
        yield run_dir
        if is_whole:
            return
    raise AssertionError("it changes more than is tried")


@pytest.mark.parametrize("part", ["checkpoints", "critic_checkpoints"])
def test_whoever_is_killed_while_a_checkpoint_gets_its_name_loses_none(part, tmp_path, monkeypatch):
    def prepare(number):
        run_dir = tmp_path / str(number)
        checkpoint(run_dir / "checkpoints" / "step-10", 10)
        checkpoint(run_dir / "checkpoints" / "step-20", 20)
        checkpoint(run_dir / part / "step-20", 20, "old")
        checkpoint(run_dir / part / "step-20.partial", 20)
        return run_dir

    def name(run_dir):
        rename(run_dir / part / "step-20.partial", run_dir / part / "step-20")

    contents = []
    for run_dir in every_kill(monkeypatch, prepare, name):
        remove_unfinished(run_dir)
        assert latest(run_dir / part) == run_dir / part / "step-20"
        assert not list((run_dir / part).glob("*.partial"))
        contents.append(json.loads((run_dir / part / "step-20" / RECORD).read_text())["content"])
    assert contents == sorted(contents, reverse=True) and set(contents) == {"old", "new"}


def test_a_checkpoint_that_is_complete_but_for_its_name_gets_it_and_an_incomplete_one_does_not(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoint(checkpoints / "step-20.partial", 20)
    checkpoint(checkpoints / "step-30.partial", 30)
    (checkpoints / "step-30.partial" / ".metadata").unlink()
    checkpoint(checkpoints / "step-40.partial", 4)  # a stranger's
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-20", "step-40.partial"]


@pytest.mark.parametrize("step", [20, 30])
@pytest.mark.parametrize("critic", [False, True])
def test_whoever_is_killed_while_steps_are_left_behind_goes_on_from_a_whole_checkpoint(
    step, critic, tmp_path, monkeypatch
):
    """All that a checkpoint needs is where the checkpoint is: in the run's directory, or in the branch."""
    parts = {"held": ".pkl", "batches": ".pkl", "checkpoints": ""} | (
        {"critic_checkpoints": ""} if critic else {}
    )

    def prepare(number):
        run_dir = tmp_path / str(number)
        for number in (20, 30, 40):
            for part, suffix in parts.items():
                path = run_dir / part / f"step-{number}{suffix}"
                put(path) if suffix else checkpoint(path, number)
        return run_dir

    for run_dir in every_kill(monkeypatch, prepare, lambda run_dir: abandon_after(run_dir, step)):
        remove_unfinished(run_dir)
        newest = newest_first(run_dir / "checkpoints")[0]
        needed = [run_dir / part / f"{newest.name}{suffix}" for part, suffix in parts.items()]
        assert all(path.exists() for path in needed)
        abandon_after(run_dir, int(newest.name[5:]))
        assert all(path.exists() for path in needed)
        assert latest(run_dir / "checkpoints") == newest
        branches = [path for path, _, _ in abandoned.abandoned(run_dir)]
        assert all(path.name == "1" for path in branches)
        for home in (run_dir, *branches):
            names = [{path.name.split(".")[0] for path in (home / part).glob("*")} for part in parts]
            assert all(there == names[0] for there in names)


REMOVERS = {
    "prune": lambda run_dir: prune(run_dir / "checkpoints" / "step-20", 1),
    "the next start": remove_unfinished,
    "a new checkpoint of the same step": lambda run_dir: rename(
        run_dir / "checkpoints" / "step-20.partial", run_dir / "checkpoints" / "step-20"
    ),
}


@pytest.mark.parametrize("remover", REMOVERS)
def test_what_is_left_of_a_checkpoint_whose_removal_was_killed_goes_with_the_next_start(
    remover, tmp_path, monkeypatch
):
    def prepare(number):
        checkpoints = tmp_path / str(number) / "checkpoints"
        for name, step in (("step-10", 10), ("step-20", 20), ("step-20.partial", 20), ("step-5.partial", 5)):
            checkpoint(checkpoints / name, step)
            put(checkpoints / name / "a directory" / "a file")
        (checkpoints / "step-5.partial" / ".metadata").unlink()
        checkpoint(tmp_path / str(number) / "critic_checkpoints" / "step-30", 30)
        return tmp_path / str(number)

    for run_dir in every_kill(monkeypatch, prepare, REMOVERS[remover]):
        checkpoints = run_dir / "checkpoints"
        remove_unfinished(run_dir)
        assert not list((run_dir / "critic_checkpoints").iterdir())
        assert latest(checkpoints) == checkpoints / "step-20"
        names = {path.name for path in checkpoints.iterdir()}
        assert names == {path.name for path in newest_first(checkpoints)}
        assert names in ({"step-20"}, {"step-10", "step-20"})


def test_what_is_still_moved_is_no_branch_yet_and_a_file_that_has_moved_does_not_matter(
    tmp_path, monkeypatch
):
    for name in ("1", "2.partial"):
        (tmp_path / "abandoned" / name / "checkpoints" / "step-4").mkdir(parents=True)
        for file in ("a", "b"):
            (tmp_path / "abandoned" / name / "checkpoints" / "step-4" / file).write_text("12345")
    is_file = Path.is_file

    def moved_at_once(path):
        there = is_file(path)
        if path.name == "a":
            path.unlink(missing_ok=True)
        return there

    monkeypatch.setattr(Path, "is_file", moved_at_once)
    assert abandoned.abandoned(tmp_path) == [(tmp_path / "abandoned" / "1", [4], 5)]
