"""Shells that lack something: one line on standard error, and exit code 2."""

import os
import subprocess
import sys

import pytest

_RL = f"{sys.executable} -m rl.cli"
_CASES = {
    "a working directory that is gone": ("mkdir gone && cd gone && rmdir ../gone && {rl} train quickstart", 2, "the working directory is gone; cd to one"),
    "little address space": ("ulimit -v 4000000 && {rl} train quickstart", 2, "address space is limited to 3.8 GiB"),
    "little address space for a worker": ("ulimit -v 4000000 && {rl} worker --listen 127.0.0.1:0", 2, "address space is limited to 3.8 GiB"),
    "little address space where nothing starts": ("ulimit -v 4000000 && {rl} train quicksart --launcher slurm", 2, "did you mean 'quickstart'"),
    "no docstrings": ("PYTHONOPTIMIZE=2 {rl} train quickstart", 2, "PYTHONOPTIMIZE=2 (-OO) leaves out docstrings"),
    "a file with the name of a module": (f"unset PYTHONSAFEPATH; echo 'raise SystemExit(7)' > queue.py; {sys.executable} -P -m rl.cli check quickstart", 0, ""),
    "standard output closed": ("{rl} --version >&-", 0, ""),
    "all closed": ("{rl} --version <&- >&- 2>&-", None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", _CASES)
def test_it_is_named(name, tmp_path):
    script, code, words = _CASES[name]
    done = subprocess.run(
        ["bash", "-c", script.format(rl=_RL)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr and words in done.stderr, done.stderr
    assert code is None or done.returncode == code
    assert len(done.stderr.splitlines()) <= 1
