"""What becomes of errors of calls to processes."""

import asyncio
import subprocess
import time

import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from rl.actors import remote
from rl.actors.remote import Caller, Deadline, ProcessDied
from rl.errors import ConfigError, DamagedCheckpoint, NotFinite, RunError
from rl.host_protocol import own_host
from rl.processes import ProcessInfo


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


def test_a_death_on_this_host_that_monarch_never_tells_of_is_noticed(monkeypatch):
    """Seen once: of three processes killed at one moment it told of two."""
    monkeypatch.setattr(remote, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(remote, "_SILENCE_SECONDS", 0.3)
    child = subprocess.Popen(["sleep", "60"])

    async def main():
        caller = Caller("generator-0")
        caller.processes = (ProcessInfo(child.pid, own_host(), "cpu"),)
        watch = asyncio.create_task(caller.until_gone("progress"))
        await asyncio.wait({watch}, timeout=1.0)
        assert not watch.done()
        child.kill()
        began = time.monotonic()
        await asyncio.wait({watch}, timeout=60.0)
        with pytest.raises(ProcessDied, match=f"generator-0 died in progress .pid {child.pid} on "):
            watch.result()
        return time.monotonic() - began

    seconds = asyncio.run(main())
    child.wait()
    assert seconds > 0.2  # holds: meaning, Monarch's own words would come first


BROKEN = DamagedCheckpoint("step-4 is broken")
NAN = NotFinite("the loss is nan", "loss")
WRONG = ConfigError("no such model; give another")
REFUSED = "it failed:\nTraceback\nrl.errors.ConfigError: ArchX is not supported; use another model\n"


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (ActorError(BROKEN), DamagedCheckpoint, "step-4 is broken"),
        (ActorError(NAN), NotFinite, "the loss is nan"),
        (ActorError(WRONG), ConfigError, "no such model; give another"),
        (ActorError(KeyError("x")), RunError, "trainer.start failed: KeyError('x'); see logs/"),
        (SupervisionError(REFUSED), RunError, "ArchX is not supported; use another model"),
    ],
)
def test_what_a_process_raises_of_rl_is_raised_here_and_no_death(raised, kind, words):
    """A checkpoint that is damaged is passed over by its kind; what a constructor refuses arrives as text."""
    with pytest.raises((RunError, ConfigError)) as failure:
        call(raised)
    assert (type(failure.value), str(failure.value)) == (kind, words)
