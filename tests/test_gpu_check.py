"""`rl gpu-check`: its table with checks that are made up, and those that a CPU can run for real."""

# holds: exact

import io
import json
import time
from contextlib import redirect_stdout

import pytest
import torch

from rl import gpu_check, gpu_checks, gpu_memory_check, gpu_stack_checks
from rl.errors import ConfigError, RunError
from rl.models.engine_config import EngineConfig
from rl.plan.cluster import GPU, Host
from rl.plan.memory import engine_memory
from rl.plan.model_shape import ModelShape
from rl.processes import ProcessInfo, is_gone, own_host
from rl.types import LoRA
from tests.tiny import write_config

CPU, ONE = Host(2, 8.0), Host(16, 64.0, (GPU("H100", 78.8, (9, 0)),))


@pytest.fixture
def table(monkeypatch, capsys, tmp_path):
    """The output of a run on a machine, with what each check answers; a name alone answers well."""

    def run(machine, answers, *arguments):
        monkeypatch.setattr(gpu_check, "look_at_host", lambda: machine)
        monkeypatch.setattr(gpu_check, "_tiny_model", lambda scratch: tmp_path)
        monkeypatch.setattr(
            gpu_check, "_run", lambda check, model: (answers.get(check.name, ""), {"gap max": 0.00123456})
        )
        code = gpu_check.gpu_check(arguments)
        return code, capsys.readouterr().out

    return run


def test_a_cpu_runs_what_it_can_and_says_what_the_others_need(table):
    code, out = table(CPU, {})
    assert code == 0 and "no GPU: 2 cores" in out and out.endswith("all that could run passed\n")
    rows = {line.split()[1]: line for line in out.splitlines() if line[:1] in "-o" and len(line.split()) > 2}
    for name in ("compile", "suspend", "bf16_no_graphs"):
        assert rows[name].startswith("-") and rows[name].endswith("needs 1 GPU")
    assert rows["self_check"].endswith("needs --model DIRECTORY")
    for name in (
        "imports",
        "fp32",
        "bf16",
        "moe",
        "lora",
        "turns",
        "fsdp",
        "tp",
        "attention",
        "context_parallel",
    ):
        assert rows[name].startswith("ok") and "gap max 0.00123" in rows[name]


def test_one_gpu_cannot_run_what_needs_two_and_a_failure_is_named(table):
    code, out = table(ONE, {"fp32": "RuntimeError: 0.5 is not under 0.001"})
    assert code == 1 and "FAIL  fp32" in out and "0.5 is not under 0.001" in out
    assert out.splitlines()[-2] == "failed: fp32" and "please report this table" in out
    assert "context_parallel" in out and "needs 2 GPUs" in out
    assert "ok    compile" in out


def test_a_model_of_one_s_own_has_its_check(table, tmp_path):
    write_config(tmp_path)
    _, out = table(CPU, {}, "--model", str(tmp_path))
    assert "ok    self_check" in out


def test_where_no_model_can_be_made_the_cause_is_a_row_and_what_needs_none_runs(table, monkeypatch):
    def fails(scratch):
        raise RuntimeError("the NVIDIA driver on your system is too old")

    table(CPU, {})
    monkeypatch.setattr(gpu_check, "_tiny_model", fails)
    monkeypatch.setattr(gpu_check, "_run", lambda check, model: ("", {}))
    out = io.StringIO()
    with redirect_stdout(out):
        assert gpu_check.gpu_check(()) == 1
    lines = out.getvalue().splitlines()
    (row,) = [line for line in lines if line.startswith("FAIL")]
    assert "model" in row and "driver on your system is too old" in row and lines[-1] == "failed: model"
    assert any(line.startswith("ok    imports") for line in lines)
    assert any(line.startswith("-     fp32") and line.endswith("needs the model") for line in lines)


def test_a_model_that_is_not_made_says_why_in_one_line(tmp_path):
    with pytest.raises(RuntimeError, match="nowhere"):
        gpu_checks.with_weights(tmp_path / "nowhere", tmp_path)


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="takes --model DIRECTORY or nothing"):
        gpu_check.gpu_check(["--devices", "8"])


def test_a_check_that_hangs_crashes_or_raises_costs_its_own_row(monkeypatch, tmp_path):
    check = gpu_check.Check("imports", "", lambda model: {})
    monkeypatch.setattr(gpu_check, "SECONDS", 0.01)
    assert gpu_check._run(check, tmp_path) == ("took longer than 0 s", {})
    monkeypatch.setattr(gpu_check, "SECONDS", 60.0)
    wrong, figures = gpu_check._run(gpu_check.Check("attention", "", lambda model: {}), tmp_path)
    assert "config.json" in wrong and figures == {}


def test_a_run_that_fails_shows_the_end_of_the_log_that_its_error_names(monkeypatch, tmp_path, capsys):
    """Its directory is gone by then."""

    async def fails(model, run_dir, *_, **__):
        (run_dir / "logs").mkdir()
        (run_dir / "logs/generator-0.log").write_text("no kernel image is available\n")
        raise RunError("generator-0 died; see logs/generator-0*.log of the run")

    monkeypatch.setattr(gpu_stack_checks, "_parity", fails)
    with pytest.raises(RunError):
        gpu_stack_checks.stack("float32", 1.0)(tmp_path)
    written = capsys.readouterr().err
    assert written.splitlines()[1:] == ["  no kernel image is available"]
    program, check = tmp_path / "program", gpu_check.CHECKS[0]
    lines = [*map(str, range(20)), *written.splitlines(), "rl: error: died"]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in lines) + "exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check.sys, "executable", str(program))
    monkeypatch.setattr(gpu_check, "CHECKS", [check])
    monkeypatch.setattr(gpu_check, "look_at_host", lambda: CPU)
    monkeypatch.setattr(gpu_check, "_tiny_model", lambda scratch: tmp_path)
    assert gpu_check.gpu_check(()) == 1
    out = capsys.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(out) if line.startswith("FAIL")]
    assert "rl: error: died (" in out[at] and "no kernel image is available" in "".join(out[at + 1 : at + 13])


def test_what_a_check_that_hangs_has_started_ends_with_it(monkeypatch, tmp_path):
    """As torchrun's ranks, which have sessions of their own."""
    program, pid = tmp_path / "program", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\nsetsid sleep 600 &\necho $! > {pid}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check.sys, "executable", str(program))
    monkeypatch.setattr(gpu_check, "SECONDS", 1.0)
    assert gpu_check._run(gpu_check.CHECKS[0], tmp_path) == ("took longer than 1 s", {})
    started, until = ProcessInfo(int(pid.read_text()), own_host(), "cpu"), time.monotonic() + 20
    while not is_gone(started):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("share, context, fits", [(1.0, 0, True), (0.8, 0, False), (1.1, 0.1, False)])
def test_the_memory_of_a_step_is_held_against_the_plan(monkeypatch, tmp_path, share, context, fits):
    """share, context: of the planned bytes, what torch's allocator takes, and what CUDA does beside it."""
    write_config(tmp_path)
    config = EngineConfig(dtype="bfloat16", max_seq_len=512)
    hf = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 512}
    planned = engine_memory(ModelShape.of(hf), config, LoRA(rank=16), learns=True, on_cpu=False).total
    taken, total = share * planned, 2 * planned
    monkeypatch.setattr(gpu_memory_check, "_qwen3_0_6b", lambda: hf)
    monkeypatch.setattr(gpu_memory_check, "_WAYS", {"plain": {}})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(gpu_memory_check.os, "environ", {})
    for name, value in {
        "mem_get_info": (total - taken - context * planned, total),
        "memory_reserved": taken,
        "max_memory_reserved": taken,
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    if fits:
        figures = gpu_memory_check.memory(tmp_path)
        assert figures["plain, of the plan"] == pytest.approx(1.0) and figures["plain, TFLOP/s"] > 0
        assert figures["plain, GiB"] == pytest.approx(planned / 2**30)
    else:
        with pytest.raises(RuntimeError, match=f"plain: {share + context:.2f} of what is planned"):
            gpu_memory_check.memory(tmp_path)


def test_a_gpu_that_is_too_small_for_a_check_is_not_called_broken(table):
    small = Host(16, 64.0, (GPU("RTX4090", 23.6, (8, 9)),))
    _, out = table(small, {})
    (row,) = [line for line in out.splitlines() if " memory " in line]
    assert row.startswith("-") and row.endswith("needs a GPU of 32 GiB")
    assert "ok    memory" in table(ONE, {})[1]


def test_float8_is_not_asked_of_a_gpu_that_has_none(table):
    old = Host(16, 64.0, (GPU("A100-80", 79.1, (8, 0)),))
    (row,) = [line for line in table(old, {})[1].splitlines() if " float8 " in line]
    assert row.startswith("-") and row.endswith("needs GPUs of compute capability 8.9")
    assert "ok    float8" in table(ONE, {})[1]


@pytest.mark.slow
def test_a_cpu_passes_what_it_can_run(capsys):
    assert gpu_check.gpu_check([]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert out.count("\nok ") == 11 and "tokens/s" in out and "sync GB/s" in out


def test_the_cause_of_a_check_in_several_processes_is_what_a_rank_says():
    errors = """Traceback (most recent call last):
  File "checks.py", line 3, in <module>
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
E1127 21:00:00.000 77 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
  error_file: <N/A>
============================================================
"""
    assert gpu_checks._OF_A_RANK.findall(errors) == [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    ]
