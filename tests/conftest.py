"""Which devices tests use: devices.py."""

import hypothesis

from tests.devices import hide_too_few

hide_too_few()

# The same examples in every run, and nothing left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")
