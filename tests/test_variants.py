"""The numeric tests on other processors than this one, as far as it can pass for them: eleven minutes.

torch, oneDNN and MKL choose kernels by what the processor can do. Told that it can do less, they compute what an older
one would. The files are all that compare with a reference's own error (numeric_bounds.py), and the losses.
"""

import os
import subprocess
import sys

import pytest

from tests.numeric_bounds import ROOT, bounds

PROCESSORS = {
    "this processor": {},
    "ATen without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "ATen with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN with AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN with AVX512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "all with AVX2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
STARTS_PROCESSES = "tests/models/test_conformance.py"  # for minutes, each with one thread


def numeric_files():
    by_reference = {b.path for b in bounds() if b.kind == "reference" and "/test_" in b.path}
    losses = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "loss").glob("test_*.py")}
    return sorted((by_reference | losses) - {STARTS_PROCESSES})


def test_the_files_that_hold_kernels_are_among_them():
    names = {path.split("/")[-1] for path in numeric_files()}
    assert {"test_attention.py", "test_engine.py", "test_hf.py", "test_lora.py", "test_logprobs.py"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_numeric_tests_pass_whatever_the_processor(processor, num_threads):
    environment = os.environ | PROCESSORS[processor] | {"OMP_NUM_THREADS": str(num_threads)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *numeric_files(),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{processor}, {num_threads} threads:\n{done.stdout[-6000:]}"
