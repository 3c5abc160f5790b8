"""Which devices tests use: devices.py."""

import signal

import hypothesis

from rl.cluster.environment import prepare_environment
from tests.devices import hide_too_few

prepare_environment()  # as `rl` does: processes that tests start wait for work as those of a run do
hide_too_few()
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a shell's background: runs of tests would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and nothing left behind.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")
