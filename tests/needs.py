"""What a test needs that `make setup` does not install. Without it the test is skipped.

Where the variable RL_TESTS_NEED names it, as .ci/run has it, the test fails instead.
"""

import os
from collections.abc import Callable

import pytest

VARIABLE = "RL_TESTS_NEED"
REMEDIES = {
    "chromium": "install Chromium or Google Chrome, as with apt-get install chromium",
    "cookbook": "run make cookbook, which installs tinker-cookbook and fetches SmolLM2",
}


def needed() -> set[str]:
    """Raises ValueError where the variable has a word that is no name here."""
    names = set(os.environ.get(VARIABLE, "").split())
    if unknown := names - REMEDIES.keys():
        raise ValueError(f"{VARIABLE} has {sorted(unknown)}; its words are {sorted(REMEDIES)}")
    return names


def need(name: str, is_here: bool) -> None:
    """name: a key of REMEDIES."""
    if not is_here:
        end: Callable[[str], object] = pytest.fail if name in needed() else pytest.skip
        end(f"needs {name}: {REMEDIES[name]}")
