"""Environments of verifiers' v1 API, unmodified: any words, and scores beside verifiers' own runs."""

# holds: exact

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.envs.test_variables import VERIFIERS_0_4
from tests.envs.verifiers_v1_cases import CASES

pytestmark = pytest.mark.slow  # a Python of its own, which imports another version of verifiers

FILE = Path(__file__).with_name("verifiers_v1_cases.py")

OF_EACH = [f"{test}[{name}]" for test in ("test_scores", "test_any_words") for name in CASES]
OTHERS = [
    "test_a_call_that_a_tools_server_refuses_is_told",
    "test_an_agent_that_is_not_trained_needs_a_client_of_its_own",
]


@pytest.mark.parametrize("test", OF_EACH + OTHERS)
def test_verifiers_v1(test):
    path = os.pathsep.join([str(VERIFIERS_0_4), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{FILE}::{test}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
