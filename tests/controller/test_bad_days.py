"""What a machine does to a run on a bad day, and what the run says then."""

import asyncio
import contextlib
import errno
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from configs.quickstart import quickstart
from rl.actors.remote import Caller, Deadline, ProcessDied
from rl.controller import run as run_module
from rl.controller import schedule as schedule_module
from rl.controller import stages as stages_module
from rl.controller.run import run
from rl.errors import ConfigError, RunError
from rl.models import checkpoint
from rl.observability import timeline as timeline_module
from rl.observability.recorder import Recorder
from rl.observability.sinks import Sinks
from rl.observability.timeline import Timeline
from rl.paths import lock_directory
from rl.processes import ProcessInfo
from rl.weight_sync.shared_memory import _reserve
from tests.controller import test_recovery as recovery_tests
from tests.controller.test_recovery import config as small
from tests.controller.test_recovery import run as run_with_fakes
from tests.controller.test_training_batch import group


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_a_full_disk_under_the_records(tmp_path, monkeypatch, name):
    """The disk fills at the first record; a checkpoint of an earlier step is there."""

    async def records(recipe, config, run_dir, in_place, is_named, tried):
        (run_dir / name).symlink_to("/dev/full")
        async with Recorder(run_dir, 2, Timeline(), Sinks({})) as recorder:
            recorder.evaluation(0, {"eval/accuracy": 0.5, "eval/standard_error": 0.1}, [group(1)])

    monkeypatch.setattr(run_module, "_main", records)
    monkeypatch.setattr(run_module, "latest", lambda path: path / "step-20")
    directory = tmp_path / "run"
    with pytest.raises(RunError) as said:
        run("quickstart", replace(quickstart(), run_dir=str(directory)))
    assert str(said.value) == (
        f"the disk of {directory} is full; make room; go on with --resume {directory}/checkpoints/step-20"
    )


@pytest.mark.parametrize(
    "number, words", [(errno.EIO, "fails; see to it"), (errno.EROFS, "may only be read")]
)
def test_a_disk_that_fails_is_named_with_what_to_go_on_from(tmp_path, monkeypatch, number, words):
    async def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_module, "_main", fails)
    monkeypatch.setattr(run_module, "latest", lambda path: path / "step-20")
    with pytest.raises(RunError, match=f"the disk of .* {words}.*; go on with --resume .*step-20"):
        run("quickstart", replace(quickstart(), run_dir=str(tmp_path / "run")))


def test_a_full_disk_under_a_checkpoint(tmp_path, monkeypatch):
    """What the writing thread met is told by whoever waits for the checkpoint; the next one may be written."""

    def fail_together(failure, group):
        if failure is not None:
            raise failure

    monkeypatch.setattr(checkpoint, "fail_together", fail_together)
    monkeypatch.setattr(checkpoint, "new_group", lambda *_, **__: None)
    checkpoints = checkpoint.Checkpoints(None, 5.0, None, dict)
    checkpoints._directory = tmp_path / "run" / "checkpoints"
    checkpoints._writing = Future()
    checkpoints._writing.set_exception(OSError(errno.ENOSPC, "x"))
    with pytest.raises(RunError) as said:
        checkpoints.wait()
    assert re.fullmatch(
        rf"a checkpoint could not be written: the disk of {tmp_path}/run/checkpoints is full \(\d+ MiB free\); "
        r"make room; the one before it is still there",
        str(said.value),
    )
    checkpoints.wait()


def test_a_directory_that_cannot_be_written():
    with pytest.raises(ConfigError, match=r"the run's directory /proc/run .*cannot be made.*give another"):
        run("quickstart", replace(quickstart(), run_dir="/proc/run"))


def test_full_shared_memory(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError) as said:
        _reserve(str(tmp_path / "model-v3-rank0.bin"), 512 << 20)
    assert "no room in shared memory for 512 MiB of weights" in str(said.value)
    assert "--shm-size" in str(said.value) and "--weight_sync.transport torchstore" in str(said.value)
    assert not list(tmp_path.iterdir())


def test_two_runs_in_one_directory(tmp_path):
    """The second is refused for as long as the first lives, however that ends."""
    code = (
        "import sys, time; from pathlib import Path; from rl.paths import lock_directory;"
        "lock_directory(Path(sys.argv[1]), 'run'); print('locked', flush=True); time.sleep(60)"
    )
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "locked\n"
    with pytest.raises(ConfigError, match=rf"belongs to a run that is under way \(pid {first.pid}\)"):
        lock_directory(tmp_path, "run")
    first.send_signal(signal.SIGKILL)
    first.wait()
    os.close(lock_directory(tmp_path, "run"))


def test_a_process_that_the_kernel_kills_for_memory_is_named_with_where_to_look():
    """As any death: with the actor, what it was doing, its pid and host, and its log."""
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

    async def answer():
        raise SupervisionError("the process this actor was running on failed: Killed(sig=9)")

    caller = Caller("generator-1", "logs/generator-1.log of the run")
    caller.processes = (ProcessInfo(4711, "here", "cpu"),)
    with pytest.raises(ProcessDied) as said:
        asyncio.run(caller.call(answer(), "sample", Deadline("progress", 5.0)))
    for part in ("generator-1 died in sample", "pid 4711 on here", "Killed(sig=9)", "logs/generator-1.log"):
        assert part in str(said.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_of_a_scheduler_ends_with_its_own_code_and_says_how_to_go_on(tmp_path, monkeypatch, number):
    async def killed(recipe, config, run_dir, in_place, is_named, tried):
        os.kill(os.getpid(), number)
        await asyncio.sleep(30)

    monkeypatch.setattr(run_module, "run_recipe", killed)
    monkeypatch.setattr(run_module, "latest", lambda path: path / "step-7")
    before = signal.signal(
        number, signal.SIG_DFL
    )  # ignored where the tests run under nohup, or in a background
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            run("quickstart", replace(quickstart(), run_dir=str(tmp_path / "run")))
    finally:
        signal.signal(number, before)
    assert raised.value.args == (number,)  # rl.cli exits with 128 + number


def test_a_second_signal_ends_what_the_first_one_waits_for(tmp_path, monkeypatch):
    """A third ends nothing more: what is left is the end of processes."""
    waited_for = []

    async def slow_to_end(recipe, config, run_dir, in_place, is_named, tried):
        for part in ("the step", "its checkpoint", "the processes"):
            waited_for.append(part)
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1.0 if part == "the processes" else 30)
                waited_for.append("to its end")
        await asyncio.sleep(0)
        raise asyncio.CancelledError

    monkeypatch.setattr(run_module, "run_recipe", slow_to_end)
    monkeypatch.setattr(run_module, "_SAME_SIGNAL_SECONDS", 0.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run("quickstart", replace(quickstart(), run_dir=str(tmp_path / "run")))
    finally:
        signal.signal(signal.SIGINT, before)
    assert waited_for == ["the step", "its checkpoint", "the processes", "to its end"]


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    """Only the monotonic clock decides and measures anything: steps have their seconds, and none is saved by time.

    The modules that take a clock as they are imported are read anew, with the clock that jumps.
    """
    settings = small(save_every_minutes=30.0)
    expected = run_with_fakes(settings, tmp_path / "steady")
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: (-1) ** next(jumps) * 3.0e7)
    monkeypatch.setattr(recovery_tests, "Timeline", runpy.run_path(timeline_module.__file__)["Timeline"])
    monkeypatch.setattr(stages_module, "SaveClock", runpy.run_path(schedule_module.__file__)["SaveClock"])
    assert run_with_fakes(settings, tmp_path / "jumping") == expected
    lines = [json.loads(line) for line in (tmp_path / "jumping" / "metrics.jsonl").read_text().splitlines()]
    times = [v for line in lines for n, v in line.items() if n.startswith(("time/", "idle/"))]
    assert times and all(0 <= seconds < 600 for seconds in times)
    saved = [sorted(path.name for path in (tmp_path / run / "checkpoints").iterdir()) for run in ("steady", "jumping")]  # fmt: skip
    assert saved[0] == saved[1]


LOG_DISK = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from rl.cluster.environment import prepare_environment
prepare_environment()
from configs.quickstart import quickstart
from rl.controller.run import run_recipe
from rl.envs.sort_letters import SortLetters

directory = Path(sys.argv[1])
(directory / "logs").mkdir(parents=True)
for name in ("trainer", "generator-0", "reward-0", "failures"):
    (directory / "logs" / f"{name}.log").symlink_to("/dev/full")
recipe = quickstart()
recipe = replace(recipe, steps=2, prompts_per_step=4, warmup=replace(recipe.warmup, steps=2), env=SortLetters(num_eval=8))
asyncio.run(run_recipe("quickstart", recipe, directory))
"""


@pytest.mark.slow
def test_a_log_disk_that_fills_costs_the_logs_and_nothing_else(tmp_path):
    """Real processes, each of which cannot write a byte to its log."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LOG_DISK, str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out accuracy after 2 steps" in done.stdout


def test_an_error_that_names_a_log_comes_with_its_end(tmp_path, monkeypatch, capsys):
    async def dies(recipe, config, run_dir, in_place, is_named, tried):
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "reward-0.log").write_text("Traceback ...\nMemoryError\n")
        raise RunError("reward-0 died; see logs/reward-0.log of the run")

    monkeypatch.setattr(run_module, "_main", dies)
    with pytest.raises(RunError, match="reward-0 died"):
        run("quickstart", replace(quickstart(), run_dir=str(tmp_path / "run")))
    assert capsys.readouterr().err.endswith("reward-0.log:\n  Traceback ...\n  MemoryError\n")
