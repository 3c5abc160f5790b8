"""Which devices tests use: devices.py."""

import hypothesis

from rl.cluster.environment import prepare_environment
from tests.devices import hide_too_few

prepare_environment()  # as `rl` does: processes that tests start wait for work as those of a run do
hide_too_few()

# The same examples in every run, and nothing left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")
