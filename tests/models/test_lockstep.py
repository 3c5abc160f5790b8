"""Ranks of a generator that do the same: where one fails at what the other did, neither goes on."""

import subprocess
import sys

import pytest

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
