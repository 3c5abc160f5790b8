"""A run to which nothing happens, of which several files tell what it did, or compare with it."""

from dataclasses import dataclass
from pathlib import Path

from tests.chaos.chaos import SECONDS, SETTINGS, Outcome, Victim
from tests.integration.runs import MAX_VERSIONS, SharedVersions


@dataclass
class Whole(Outcome):
    run_dir: Path = Path()
    versions: frozenset[str] = frozenset()  # names of what it published in shared memory


def whole_run(directory: Path) -> Whole:
    """Two trainer ranks and two generators, synchronous; what it holds in shared memory is watched."""
    victim = Victim(SETTINGS[1], directory)
    versions = SharedVersions(victim.process.pid)
    try:
        victim.process.wait(SECONDS)
    finally:
        versions.stop()
    outcome = victim.outcome()
    assert outcome.survived and versions.most <= MAX_VERSIONS, (versions.most, outcome.output[-3000:])
    return Whole(**vars(outcome), run_dir=victim.run_dir, versions=frozenset(versions.seen))
