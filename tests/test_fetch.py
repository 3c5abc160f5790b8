"""`rl fetch`: a directory is complete or not there, so that an interrupted fetch costs nothing but itself."""

import subprocess
import sys

import pytest

from rl import fetch as module
from rl.errors import ConfigError, RunError
from rl.fetch import fetch

FILES = ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"]


def parts(monkeypatch, stop_after=None, error=None):
    """A download and a conversion that write FILES one by one and, after some, fail."""
    written = 0

    def write(path):
        nonlocal written
        if written == stop_after:
            raise error
        path.write_text("x")
        written += 1

    monkeypatch.setattr(module, "_download", lambda scratch: write(scratch / "gguf"))
    monkeypatch.setattr(module, "_convert", lambda scratch, out: [write(out / name) for name in FILES])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left"), RunError("no network")])
@pytest.mark.parametrize("stop_after", range(len(FILES) + 1))
@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_fetch_leaves_nothing_that_blocks_the_next(
    tmp_path, monkeypatch, stop_after, error, exists
):
    directory = tmp_path / "models" / "smollm2"
    if exists:  # and is empty
        directory.mkdir(parents=True)
    parts(monkeypatch, stop_after, error)
    with pytest.raises(type(error)):
        fetch(["smollm2", str(directory)])
    assert [*(tmp_path / "models").iterdir()] == [directory] * exists
    parts(monkeypatch)
    assert fetch(["smollm2", str(directory)]) == 0
    assert sorted(path.name for path in directory.iterdir()) == sorted(FILES)
    assert [*(tmp_path / "models").iterdir()] == [directory]


def test_so_does_one_that_was_killed(tmp_path):
    code = (
        "import os, sys; from rl import fetch\n"
        "fetch._download = lambda scratch: None\n"
        "fetch._convert = lambda scratch, out: ((out / 'tokenizer.json').write_text('x'), os._exit(9))\n"
        "fetch.fetch(['smollm2', sys.argv[1]])"
    )
    directory = tmp_path / "smollm2"
    done = subprocess.run([sys.executable, "-c", code, str(directory)])
    assert done.returncode == 9
    done = subprocess.run([sys.executable, "-c", code.replace("os._exit(9)", "0"), str(directory)])
    assert done.returncode == 0 and (directory / "tokenizer.json").is_file()


def test_a_link_to_an_empty_directory_stays_a_link(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    parts(monkeypatch)
    assert fetch(["smollm2", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == sorted(FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@pytest.mark.parametrize("name", [".", "./", "../here", "link", "here"])
def test_a_directory_that_cannot_be_replaced_is_refused_before_the_download(tmp_path, monkeypatch, name):
    """The current directory under every name, and one where a disk is mounted."""
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "link").symlink_to("here")
    if name == "here":
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("os.path.ismount", lambda path: str(path) == str(here))
    else:
        monkeypatch.chdir(here)
    parts(monkeypatch, stop_after=0, error=AssertionError("it downloads"))
    with pytest.raises(ConfigError, match="the directory .* is .*; give a new directory, such as "):
        fetch(["smollm2", str(tmp_path / name) if name == "link" else name])
    assert not [*here.iterdir()]


def test_a_directory_that_is_filled_meanwhile_is_refused(tmp_path, monkeypatch):
    parts(monkeypatch)
    convert = module._convert

    def fill(scratch, out):
        convert(scratch, out)
        (tmp_path / "smollm2").mkdir()
        (tmp_path / "smollm2" / "notes").touch()

    monkeypatch.setattr(module, "_convert", fill)
    with pytest.raises(ConfigError, match="smollm2 cannot be made .*; give another"):
        fetch(["smollm2", str(tmp_path / "smollm2")])
    assert [path.name for path in tmp_path.rglob("*")] == ["smollm2", "notes"]
