"""What a host says of its own CPU, against torch."""

import pytest
import torch

from rl.cluster import machine

AVX512 = "flags : fpu avx2 avx512f avx512dq avx512bw avx512vl"


def test_torch_multiplies_bfloat16_by_onednn_where_there_are_instructions_for_it():
    if machine.has_bfloat16():
        assert torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (f"{AVX512} avx512_bf16", True),
        (AVX512, False),
        (f"processor : 0\n{AVX512} amx_bf16\nflags : fpu", True),
        ("flags : fpu avx2 fma", False),
        ("Features : fp asimd bf16", True),
        ("Features : fp asimd", False),
        ("processor : 0", None),
    ],
)
def test_flags_of_a_cpu(monkeypatch, tmp_path, text, has):
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "cpuinfo")
    assert machine.has_bfloat16() is None  # no such file
    (tmp_path / "cpuinfo").write_text(text)
    assert machine.has_bfloat16() is has
