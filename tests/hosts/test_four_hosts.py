"""A run over four hosts: the trainer on two, a generator on each of the others, and rewards on the first and last."""

import os

import pytest

from tests.hosts.runs import MORTAL, TWO_RANKS, check_same, left_on, numbers, train, two_hosts

OVER_FOUR = (
    *TWO_RANKS,
    "--trainer.hosts",
    "0",
    "1",
    "--generator.hosts",
    "2",
    "3",
    "--reward.hosts",
    "0",
    "3",
)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")
def test_four_hosts_give_the_numbers_of_one(directory, on_one_host):
    with two_hosts(directory, 4) as made:
        train(made, MORTAL, *OVER_FOUR, "--run_dir", directory / "run", seconds=400)
        assert [left_on(host) for host in made] == [[], [], [], []]
    check_same(numbers(directory / "run"), on_one_host)
