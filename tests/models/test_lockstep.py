"""Ranks of a generator that do the same: where one fails at what the other did, neither goes on."""

import subprocess
import sys

import pytest

from rl.errors import RunError
from rl.models.generator import lockstep
from rl.models.generator.commands import Admit, Load, Tick
from rl.types import SamplingParams
from rl.weight_sync.manifest import Manifest
from tests.ports import free_port

WORKER = "tests.models.lockstep_worker"


@pytest.mark.parametrize(
    ("fails", "first", "second"),
    [
        ("none", "answers [{1: None}, {2: None}]", ""),
        ("both", "answers [{1: WeightsUnreachable('rank 0 does not reach them')}, {2: None}]", ""),
        ("second", "raised weights changed on some ranks alone; what failed on each: [{}, {1: 'rank 1", "changed on some"),
        ("process", "raised ", "ValueError: rank 1 has a bug"),
    ],
)  # fmt: skip
def test_what_one_rank_fails_at_both_notice(fails, first, second):
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", WORKER, str(rank), port, fails],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    (output, errors), (_, words) = [rank.communicate(timeout=60) for rank in ranks]
    assert ranks[0].returncode == 0, errors
    assert output.startswith(first), output
    assert ranks[1].returncode == 1 and second in words  # it follows until it fails, or is left alone


def test_a_load_that_came_with_requests_is_compared_and_requests_alone_are_not(monkeypatch):
    """The collectives of two ranks, of which the other one failed at nothing."""
    compared = []

    class Fails:
        def tick(self, commands):
            return Tick({command.id: RunError("rank 0 does not reach it") for command in commands}, 0)

    def gather(everyone, own, group):
        compared.append(own)
        everyone[:] = [own, {}]

    monkeypatch.setattr(lockstep.dist, "new_group", lambda **_: "both")
    monkeypatch.setattr(lockstep.dist, "broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(lockstep.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(lockstep.dist, "all_gather_object", gather)
    first, admit = lockstep.Lockstep(Fails(), 2), Admit(1, (5,), SamplingParams(3))
    assert isinstance(first.tick([admit]).answers[1], RunError) and not compared
    with pytest.raises(RuntimeError, match="weights changed on some ranks alone"):
        first.tick([admit, Load(2, Manifest(0, ()))])
