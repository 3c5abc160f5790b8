"""Which checkpoint is meant, in whose directory, and one run at a time in a directory."""

import errno
import fcntl
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from configs.quickstart import quickstart
from rl.config.codec import read_config, write_config
from rl.config.recipes import load_recipe
from rl.config.resume import going_on, is_own, with_newest_checkpoint
from rl.config.validate import validate
from rl.controller import run as running
from rl.errors import ConfigError, RunError
from rl.loss.advantages.gae import GAE
from rl.models.checkpoint_dir import latest
from rl.paths import lock_directory


def complete(directory, step):
    path = directory / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    (path / "record.json").write_text('{"state": {}}')
    return path


def test_latest_with_a_run_directory_is_its_own_newest_or_the_beginning(tmp_path):
    config = replace(quickstart(), run_dir=str(tmp_path / "run"), resume="latest")
    assert with_newest_checkpoint("quickstart", config) == (replace(config, resume=""), [])
    complete(tmp_path / "run", 20)
    newest = complete(tmp_path / "run", 100)
    found, missing = with_newest_checkpoint("quickstart", config)
    assert found.resume == str(newest) and not missing
    assert is_own(found.resume, found.run_dir) and not is_own(found.resume, tmp_path / "other")
    assert not is_own(found.resume, "") and not is_own("", found.run_dir)


def test_a_run_that_lost_its_first_life_before_a_checkpoint_begins_where_it_began(tmp_path, monkeypatch):
    """Not with the base model: --resume latest in the directory of a run that began at another's checkpoint."""
    monkeypatch.chdir(tmp_path)
    started = []

    async def life(recipe, config, run_dir, in_place, is_named, tried):
        started.append((config.resume, in_place))

    monkeypatch.setattr(running, "run_recipe", life)
    monkeypatch.setattr(running, "validate", lambda *_, **__: [])
    other = complete(tmp_path / "other", 50)
    config = replace(quickstart(), run_dir="run", resume="other/checkpoints/step-50")
    running.run("quickstart", config)
    assert started.pop() == ("run/origin/checkpoints/step-50", False)
    monkeypatch.chdir(other)
    again = replace(config, run_dir=str(tmp_path / "run"), resume="latest")
    kept = tmp_path / "run" / "origin" / "checkpoints" / "step-50"
    for _ in range(2):  # what a second life writes down names it, too
        running.run("quickstart", again)
        assert started.pop() == (str(kept), True)
    own = complete(tmp_path / "run", 60)
    for _ in range(2):
        running.run("quickstart", again)
        assert started.pop() == (str(own), True)
    assert not kept.exists()  # that life has ended
    (own / ".metadata").write_bytes(b"")
    running.run("quickstart", again)
    assert started.pop() == (str(kept), True)
    assert not own.exists() and (tmp_path / "run" / "abandoned" / "1" / "checkpoints" / "step-60").is_dir()


def test_what_a_newer_version_wrote_is_refused_and_nothing_older_taken_in_its_place(tmp_path):
    config = replace(quickstart(), run_dir=str(tmp_path), resume="latest", steps=100)
    complete(tmp_path, 20)
    newest = complete(tmp_path, 40)
    (newest / "record.json").write_text('{"version": 2, "state": {}}')
    refused = f"{newest}/record.json has version 2, and this rl reads 1; use the rl that wrote it"
    for refuse in (with_newest_checkpoint, going_on):
        with pytest.raises(ConfigError, match=f"^{refused}$"):
            refuse("quickstart", config)
    with pytest.raises(ConfigError, match=f"^{refused}$"):
        latest(tmp_path / "checkpoints")
    write_config(tmp_path, "quickstart", config)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["version"] == 1
    (tmp_path / "config.json").write_text(json.dumps(settings | {"version": 2}))
    refused = f"{tmp_path}/config.json has version 2, and this rl reads 1; use the rl that wrote it"
    for read in (read_config, load_recipe):
        with pytest.raises(ConfigError, match=f"^{refused}$"):
            read(str(tmp_path))
    del settings["version"]  # as the first ones
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert load_recipe(str(tmp_path))[1].steps == 100


def test_the_newest_of_all_runs_is_not_one_that_is_older_than_what_a_newer_version_wrote(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart-1", "quickstart-2"):
        run_dir = tmp_path / "runs" / name
        run_dir.mkdir(parents=True)
        write_config(run_dir, "quickstart", quickstart())
        complete(run_dir, 20)
    config = replace(quickstart(), resume="latest")
    assert with_newest_checkpoint("quickstart", config)[0].resume
    settings = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(settings | {"version": 2}))
    with pytest.raises(ConfigError, match="runs/quickstart-2/config.json has version 2, and this rl reads 1"):
        with_newest_checkpoint("quickstart", config)
    (run_dir / "config.json").write_text("{")  # of which nothing is known
    assert "quickstart-1" in with_newest_checkpoint("quickstart", config)[0].resume


def test_a_run_without_a_critic_is_not_passed_over_where_one_is_needed_now(tmp_path):
    """It is named, so that it can be refused; what is missing is no damage."""
    config = replace(quickstart(), run_dir=str(tmp_path), resume="latest", advantages=GAE())
    assert config.algorithm.needs_critic
    own = complete(tmp_path, 20)
    assert with_newest_checkpoint("quickstart", config)[0].resume == str(own)
    critic = complete(tmp_path / "x", 10)
    critic.parent.rename(tmp_path / "critic_checkpoints")
    assert with_newest_checkpoint("quickstart", config)[0].resume == ""


def test_a_second_run_in_a_directory_is_refused_until_the_first_has_ended(tmp_path):
    code = "import sys; from rl.paths import *; lock_directory(Path(sys.argv[1]), 'run'); print(1, flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline()
    with pytest.raises(ConfigError, match=rf"belongs to a run that is under way \(pid {other.pid}\)"):
        lock_directory(tmp_path, "run")
    other.kill()
    other.wait()
    os.close(lock_directory(tmp_path, "run"))


@pytest.mark.parametrize("variable", ["", "RL_TOLD", "RL_HOSTS_SECONDS"])
def test_a_job_that_is_started_again_waits_for_its_controller_of_before(variable, tmp_path, monkeypatch):
    """Which may live for as long as it takes to notice that its host is lost. Nobody waits for a run that is no job's."""
    first = lock_directory(tmp_path, "run")
    (tmp_path / ".lock").write_text("17 on another-host\n")
    asked = []

    def lock(file):
        asked.append(file)
        return len(asked) > 2

    monkeypatch.setattr("rl.paths.lock", lock)
    monkeypatch.setattr("rl.paths.time.sleep", lambda seconds: None)
    for name in ("RL_TOLD", "RL_HOSTS_SECONDS"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "60")
    patience = running._patience(quickstart())
    assert patience == (quickstart().deadlines.start + 60 if variable else 0)
    if variable:
        os.close(lock_directory(tmp_path, "run", patience))
        assert len(asked) == 3
    else:
        with pytest.raises(ConfigError, match=r"under way \(pid 17 on another-host\); wait for it"):
            lock_directory(tmp_path, "run", patience)
    os.close(first)


def test_a_file_system_without_locks_is_refused_by_its_cause(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        ConfigError, match="its file system has no locks .*No locks available.*; give a directory on"
    ):
        lock_directory(tmp_path, "run")
    with pytest.raises(ConfigError, match="has no locks"):
        running.run("quickstart", replace(quickstart(), run_dir=str(tmp_path / "run")))


OTHERS = {
    "a model": {"config.json": '{"architectures": ["Qwen3ForCausalLM"]}', "model.safetensors": ""},
    "settings of something": {"config.json": '{"recipe": 3}'},
    "a recipe's name alone": {"config.json": '{"recipe": "quickstart"}'},
    "no JSON": {"config.json": "recipe: quickstart"},
    "no config.json": {"checkpoints/step-1/record.json": "{}"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_going_on_in_a_directory_that_is_no_run_s_changes_no_byte_of_it(name, tmp_path, monkeypatch):
    def launch(*_, **__):
        raise RunError("it starts")

    monkeypatch.setattr(running, "launch", launch)
    for path, content in OTHERS[name].items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config = replace(quickstart(), run_dir=str(tmp_path), resume="latest", steps=1)
    with pytest.raises(ConfigError, match="give another directory"):
        running.run("quickstart", config)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("killed_with", [[], [".lock"], [".lock", "config.json.partial"]])
def test_a_run_that_was_killed_before_its_config_was_written_begins_again(killed_with, tmp_path):
    for name in killed_with:
        (tmp_path / name).touch()
    config = replace(quickstart(), run_dir=str(tmp_path))
    assert validate(config, in_place=True) == []
    write_config(tmp_path, "quickstart", config)
    assert validate(config, in_place=True) == []


def test_a_config_is_the_old_or_the_new_one_wherever_its_writing_ends(tmp_path, monkeypatch):
    write_config(tmp_path, "quickstart", quickstart())
    before = (tmp_path / "config.json").read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    for owner, name in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="is full"):
            patch.setattr(owner, name, fail)
            write_config(tmp_path, "quickstart", replace(quickstart(), steps=7))
        assert (tmp_path / "config.json").read_bytes() == before
