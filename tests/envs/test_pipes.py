"""Messages over pipes: also over descriptors past the 1,023 that select.select takes."""

import fcntl
import os
import resource

import pytest

from rl.envs.pipes import receive, send


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_descriptor_of_any_number_is_read_from_within_the_limit(many_files):
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1030)
    try:
        send(writer, {"reward": 1.0})
        assert receive(high, limit_seconds=5.0) == {"reward": 1.0}
        with pytest.raises(TimeoutError):
            receive(high, limit_seconds=0.01)
        os.close(writer)
        with pytest.raises(EOFError):
            receive(high, limit_seconds=5.0)
    finally:
        os.close(reader)
        os.close(high)
