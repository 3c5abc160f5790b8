"""Deaths by turns, in each phase and in each switch: of who is on its devices, of who is away, of who is on the way.

Trainer, critic and generator take turns. Each run is that of processes that all stay, to which nothing happens.
"""

import json
from dataclasses import replace

import pytest

from tests.chaos.chaos import SETTINGS, TURNS, Victim, differences, undisturbed
from tests.chaos.killing_controller import STEPS_BETWEEN, Moment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = 600.0
MOMENTS = {
    "phases": [
        Moment("generator-0", "sample", "generator-0"),
        Moment("generator-0", "sample", "trainer"),
        Moment("reward-0", "score", "reward-0"),
        Moment("reward-0", "score", "critic"),
        Moment("critic", "forward", "critic"),
        Moment("critic", "forward", "generator-0"),
        Moment("trainer", "forward_backward", "trainer"),
        Moment("trainer", "forward_backward", "generator-0"),
        Moment("trainer", "publish_weights", "trainer"),
        Moment("trainer", "publish_weights", "generator-0"),
        Moment("trainer", "save_checkpoint", "trainer"),
    ],
    "switches": [
        Moment("generator-0", "suspend", "generator-0"),
        Moment("generator-0", "suspend", "trainer"),
        Moment("generator-0", "load_weights", "generator-0"),
        Moment("generator-0", "load_weights", "critic"),
        Moment("trainer", "resume", "trainer"),
        Moment("trainer", "resume", "generator-0"),
        Moment("trainer", "suspend", "trainer"),
        Moment("trainer", "suspend", "critic"),
        Moment("critic", "resume", "critic"),
        Moment("critic", "suspend", "critic"),
        Moment("critic", "suspend", "trainer"),
    ],
}
STEPS = ("--steps", str((STEPS_BETWEEN + 1) * max(map(len, MOMENTS.values()))))
STAY = replace(next(s for s in SETTINGS if s.name == "with a critic"), flags=STEPS)


@pytest.fixture(scope="module")
def stayed(tmp_path_factory):
    run = undisturbed(STAY, tmp_path_factory.mktemp("stayed"))
    assert run.survived, run.output[-3000:]
    return run


@pytest.mark.parametrize("kind", MOMENTS)
def test_whoever_dies_and_whenever_the_run_is_that_of_processes_that_all_stay(
    kind, stayed, tmp_path, monkeypatch
):
    died = tmp_path / "died"
    monkeypatch.setenv("MOMENTS", json.dumps(MOMENTS[kind]))
    monkeypatch.setenv("DIED", str(died))
    victim = Victim(replace(STAY, flags=(*STEPS, *TURNS)), tmp_path, "tests.chaos.killing_controller")
    victim.process.wait(SECONDS)
    run = victim.outcome()
    assert not differences(STAY, run, stayed), run.output[-3000:]
    assert [Moment(*json.loads(line)) for line in died.read_text().splitlines()] == MOMENTS[kind]
