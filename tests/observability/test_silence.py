"""What takes long before a run's first process is there says so, and its thread ends with it."""

# holds: exact

import io
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from rl.controller.check import check
from rl.controller.plan import plan
from rl.observability import silence
from rl.observability.silence import break_silence

RECIPE = """
import string
import time
from dataclasses import dataclass, replace
from rl.configs.quickstart import quickstart
from rl.config import RunConfig, WarmupConfig
from rl.envs.base import Env
from rl.models.sources import TinyQwen3
from rl.types import Problem

problems = []

@dataclass(frozen=True)
class Slow(Env):
    num_eval: int = 2
    max_new_tokens: int = 8
    def generate(self, seed):
        if not problems:
            time.sleep({generate})
        problems.append(seed)
        return Problem(str(seed), str(seed), "7")
    def reward(self, problem, response, stop):
        time.sleep({reward})
        return 0.5

def f() -> RunConfig:
    time.sleep({load})
    return replace(quickstart(), model=TinyQwen3(alphabet=string.printable), warmup=WarmupConfig(), env=Slow())
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(silence, "_SECONDS", 0.2)


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        ("load", "loading the recipe mine.py"),
        ("generate", "making problems of Slow"),
        ("reward", "trying Slow with a canned policy"),
    ],
)
def test_rl_check_says_what_takes_long(slow, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seconds = {"load": 0.0, "generate": 0.0, "reward": 0.0} | {slow: 0.5}
    (tmp_path / "mine.py").write_text(RECIPE.format(**seconds))
    before = set(threading.enumerate())
    assert check(["mine.py"]) == 0
    assert set(threading.enumerate()) <= before
    lines = capsys.readouterr().err.splitlines()
    assert any(line.endswith(f" s: {words}") for line in lines), lines


def test_what_ends_in_time_says_nothing(capsys):
    with break_silence("a moment"):
        pass
    assert capsys.readouterr() == ("", "")


def test_the_thread_ends_with_a_body_that_raises(capsys):
    before = threading.active_count()
    with pytest.raises(KeyError), break_silence("an error"):
        time.sleep(0.5)
        raise KeyError
    assert threading.active_count() == before
    told = capsys.readouterr().err
    time.sleep(0.5)
    assert "s: an error\n" in told and capsys.readouterr() == ("", "")


def test_lines_reach_a_standard_error_that_the_body_redirects(capfd):
    with break_silence("a redirect"):
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        time.sleep(0.5)
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    assert "s: a redirect\n" in capfd.readouterr().err


def test_lines_are_seen_at_once_where_standard_error_is_no_file(monkeypatch):
    told = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(told))
    with break_silence("no file"):
        time.sleep(0.5)
        assert b"s: no file" in told.getvalue()


def test_a_closed_standard_error_is_no_error():
    program = (
        "import time\n"
        "from rl.observability import silence\n"
        "silence._SECONDS = 0.01\n"
        "with silence.break_silence('nothing'):\n"
        "    time.sleep(0.1)\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=write, text=True)
    os.close(write)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_plan_as_json_is_json_however_long_its_recipe_loads(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(RECIPE.format(load=0.5, generate=0, reward=0))
    assert plan([f"{tmp_path}/mine.py", "--json", "--cluster", "1xH100-80"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["command"] == "train" and "loading the recipe mine.py" in told.err
