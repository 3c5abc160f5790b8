"""Weights between hosts as what changed since the version before."""

import os
import re

import pytest

from tests.hosts.runs import MORTAL, numbers, train, two_hosts

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")
APART = ("--trainer.hosts", 0, "--generator.hosts", 1, "--dtype", "bfloat16", "--steps", 6)


@pytest.mark.slow
def test_what_changed_gives_the_numbers_of_whole_weights_bit_for_bit(directory):
    """With a learning rate as of a large model: few values of bfloat16 change."""
    shares, found = {}, {}
    with two_hosts(directory) as made:
        for delta in ("off", "on"):
            run_dir = directory / delta
            more = ("--trainer.lr", 1e-6, "--weight_sync.delta", delta, "--run_dir", run_dir)
            train(made, MORTAL, *APART, *more)
            log = (run_dir / "logs" / "generator-0.log").read_text()
            came = re.findall(r"model-v(\d+)-rank0.bin: ([\d.]+) MB of ([\d.]+) came", log)
            shares[delta] = {int(version): float(part) / float(whole) for version, part, whole in came}
            found[delta] = numbers(run_dir)
    assert found["on"] == found["off"] and len([line for line in found["on"] if "loss" in line]) == 6
    assert shares["on"].keys() == shares["off"].keys() and len(shares["on"]) > 5
    later = {version: share for version, share in shares["on"].items() if version > min(shares["on"])}
    assert {*shares["off"].values()} == {1.0}
    assert max(later.values()) < 0.3, shares  # holds: meaning, a whole version is 1
