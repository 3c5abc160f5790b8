"""Ranks stay alike where a file is not there for one of them, or not written in time."""

import subprocess
import sys

from tests.ports import free_port

WORKER = "tests.models.two_ranks_worker"


def test_what_one_rank_cannot_read_or_write_in_time_both_hear_of(tmp_path):
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", WORKER, str(rank), port, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for output, errors in [rank.communicate(timeout=100) for rank in ranks]:
        of_adapters, of_checkpoint = output.splitlines() or [errors[-3000:], ""]
        assert of_adapters == "['refused', 'refused'] {0.25} ['saved', 'used']"
        assert of_checkpoint == "['late', 'late', 'written']"
    assert (tmp_path / "step-1").is_dir()
