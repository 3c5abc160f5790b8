"""What several files compare with."""

import pytest

from tests.chaos.chaos import SETTINGS, undisturbed


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run to which nothing happens: two trainer ranks and two generators, synchronous."""
    found = undisturbed(SETTINGS[1], tmp_path_factory.mktemp("whole"))
    assert found.survived, found.output[-3000:]
    return found
