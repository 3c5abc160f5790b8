"""The numeric tests on other processors than this one, as far as it can pass for them: minutes.

torch, oneDNN and MKL choose kernels by what the processor can do. Told that it can do less, they compute what an older
one would. The files are those of tests/models that compare with a reference's own error (numeric_bounds.py) in the
test's own process, and the losses.
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
PAIRS = list(zip(*[iter(PROCESSORS)] * 2, strict=True))
# Each with one thread, and for longer than all others.
START_PROCESSES = {f"tests/models/test_{name}.py" for name in ("checkpoint", "conformance", "value_head")}


def numeric_files():
    by_reference = {
        b.path for b in bounds() if b.kind == "reference" and b.path.startswith("tests/models/test_")
    }
    losses = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "loss").glob("test_*.py")}
    return sorted((by_reference | losses) - START_PROCESSES)


def test_the_files_that_hold_kernels_are_among_them():
    names = {path.split("/")[-1] for path in numeric_files()}
    assert {"test_attention.py", "test_engine.py", "test_hf.py", "test_lora.py", "test_logprobs.py"} <= names


def start(processor, num_threads, output):
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
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def check(processors, num_threads, directory):
    """The tests pass on each of these processors; they run beside each other."""
    processes = {}
    try:
        for processor in processors:
            with (directory / processor).open("w") as output:
                processes[processor] = start(processor, num_threads, output)
        for processor, process in processes.items():
            code = process.wait(timeout=1200)
            printed = (directory / processor).read_text()
            assert code == 0, f"{processor}, {num_threads} threads:\n{printed[-6000:]}"
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("processors", PAIRS, ids=" and ".join)
def test_numeric_tests_pass_whatever_the_processor(processors, tmp_path):
    """With one thread each, so that two cores run two at a time."""
    check(processors, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["this processor", "all with AVX2"])
def test_numeric_tests_pass_with_two_threads(processor, tmp_path):
    """Threads split sums, whatever the instructions that compute a part."""
    check([processor], 2, tmp_path)
