"""A closed or full standard output ends output, not the command."""

import os
import subprocess
import sys

HELP = [sys.executable, "-m", "rl.cli", "train", "quickstart", "--help"]
GO_ON = """
import sys
from rl.output import forgiving_output
with forgiving_output():
    for _ in range(10000):
        print("a line of a run", flush=True)
print("done", file=sys.stderr)
"""


def run(command):
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)


def test_help_into_head_and_into_a_full_device():
    command = " ".join(HELP)
    done = run(f"{command} | head -2; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == 0 and done.stderr == "" and "usage: rl train quickstart" in done.stdout
    done = run(f"{command} >/dev/full")
    assert done.returncode == 2
    assert (
        done.stderr.startswith("rl: error: standard output could not be written")
        and done.stderr.count("\n") == 1
    )


def test_what_an_encoding_lacks_is_escaped():
    code = "from rl.output import forgiving_output\nwith forgiving_output(): print('3 \u2260 4')"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert done.stdout == b"3 \\u2260 4\n"


def test_what_runs_goes_on_without_its_output():
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" | head -1; exit ${PIPESTATUS[0]}', sys.executable, GO_ON],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "a line of a run\n", "done\n")


def test_an_error_that_nobody_reads_keeps_its_exit_code():
    """As of `rl ... 2>&1 | tee` after Ctrl-C, which ends tee first."""
    done = run(f"{sys.executable} -m rl.cli fetch nothing 2>&1 | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stdout) == (2, "")
    assert run(f"{sys.executable} -m rl.cli fetch nothing 2>&-").returncode == 2
