"""What becomes of errors of calls to processes."""

import asyncio

import pytest

from rl.actors.remote import Caller, Deadline, ProcessDied
from rl.errors import RunError


async def fails(error):
    raise error


def call(error):
    return asyncio.run(Caller("trainer").call(fails(error), "start", Deadline("start", 5.0)))


def test_a_process_that_ends_before_it_has_an_actor_has_died():
    text = "error spawning actor mesh: statuses: Timeout(30.05s)=1..2;Running=0..1\n\nStack backtrace:\n   0: <anyhow"
    with pytest.raises(ProcessDied) as failure:
        call(RuntimeError(text))
    assert str(failure.value) == (
        "the processes of trainer did not all start (error spawning actor mesh: statuses: "
        "Timeout(30.05s)=1..2;Running=0..1); see logs/"
    )


def test_any_other_error_is_the_calls_own():
    with pytest.raises(RunError, match=r"trainer.start failed: RuntimeError\('no'\); see logs/") as failure:
        call(RuntimeError("no"))
    assert not isinstance(failure.value, ProcessDied)
