"""A config.json that cannot be read: its file, the line and the remedy are named, wherever it is asked for."""

# holds: exact

import json
import os
from dataclasses import replace

import pytest

from configs.quickstart import quickstart
from rl.config.codec import why_no_run, write_config
from rl.config.recipes import load_recipe
from rl.config.resume import changed_settings
from rl.errors import ConfigError


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "x"
    path.mkdir(parents=True)
    write_config(path, "quickstart", quickstart())
    return path


def refusal(name):
    with pytest.raises(ConfigError) as error:
        load_recipe(name)
    return str(error.value)


def names_of(run_dir, monkeypatch):
    """As a user writes the run: its file, its directory, from above, from beside and from within."""
    yield from (str(run_dir / "config.json"), str(run_dir), "runs/x", "runs/x/", "./runs/x/config.json")
    for here, names in ((run_dir.parent, ("x", "x/")), (run_dir, (".", "config.json", "../x"))):
        monkeypatch.chdir(here)
        yield from names


@pytest.mark.parametrize("share", range(10))
def test_one_that_was_cut_off(share, run_dir, monkeypatch):
    text = (run_dir / "config.json").read_text()[:-1]
    cut = text[: len(text) * share // 9]
    (run_dir / "config.json").write_text(cut)
    for name in names_of(run_dir, monkeypatch):
        said = refusal(name)
        assert "unknown recipe" not in said
        assert os.path.basename(said.partition(" is not the config.json of a run (line ")[0]) == "config.json"
        line = int(said.partition("(line ")[2].partition(",")[0])
        assert 0 <= cut.count("\n") + 1 - line <= 1  # the decoder blames a trailing comma's line
        assert said.endswith("; mend it, or give a recipe")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n"recipe":\n"\xff"}', "(line 3: the byte 0xff is no UTF-8); mend it"),
        (b"[" * 100_000, "nested too deep"),
        (b"[]", "it names no recipe"),
        (b'{"recipe": "quickstart"}', "cannot be read back; give a recipe"),
        (b'{"recipe": "quickstart", "type": "rl.gone:X"}', "names 'rl.gone:X', which is not there"),
    ],
)
def test_another_that_cannot_be_read(content, words, run_dir, monkeypatch):
    (run_dir / "config.json").write_bytes(content)
    for name in names_of(run_dir, monkeypatch):
        said = refusal(name)
        assert words in said and "config.json " in said


def test_a_run_is_known_by_any_name_but_a_recipes(run_dir, monkeypatch):
    for name in names_of(run_dir, monkeypatch):
        assert load_recipe(name) == ("quickstart", quickstart())
    write_config(run_dir, "quickstart", replace(quickstart(), steps=3))
    monkeypatch.chdir(run_dir.parent)
    (run_dir.parent / "quickstart").symlink_to(run_dir)
    assert load_recipe("quickstart")[1].steps == quickstart().steps != 3
    assert load_recipe("./quickstart")[1].steps == 3


def test_who_goes_on_is_told_of_it(run_dir):
    (run_dir / "config.json").write_text('{\n "recipe": ')
    config = replace(quickstart(), resume=str(run_dir / "checkpoints" / "step-1"))
    (line,) = changed_settings(config)
    assert f"{run_dir}/config.json is not the config.json of a run (line 2, column 12: " in line
    assert line.startswith("what has changed since the checkpoint's run is not known: ")
    why = why_no_run(run_dir)
    assert why.startswith("has a config.json that is not a run's (line 2, column 12: ")
    assert why.endswith(f"; mend {run_dir}/config.json, or give another directory")
    (run_dir / "config.json").unlink()
    assert changed_settings(config) == []


def test_a_setting_that_an_older_run_did_not_have_has_changed_where_it_is_not_its_default(run_dir):
    written = json.loads((run_dir / "config.json").read_text())
    del written["stream_groups"], written["trainer"]["spare_hosts"], written["trainer"]["min_hosts"]
    (run_dir / "config.json").write_text(json.dumps(written))
    config = replace(quickstart(), resume=str(run_dir / "checkpoints" / "step-1"))
    assert changed_settings(config) == []
    (line,) = changed_settings(replace(config, trainer=replace(config.trainer, spare_hosts=(2,))))
    assert line == "changed since the checkpoint's run: trainer.spare_hosts (its default) -> [2]"
