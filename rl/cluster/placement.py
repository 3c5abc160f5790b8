"""Placement: which role has how many processes, on which devices, with how many threads. Pure functions."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

ENGINE_ROLES = ("trainer", "critic", "reference")


@dataclass(frozen=True)
class Place:
    """Where the processes of a role run, on this host."""

    num_procs: int
    first_device: (
        int | None
    )  # of as many consecutive ones, where there are GPUs; None for a role that needs none
    num_threads: int  # of each process


def place(roles: Mapping[str, int], num_cores: int | None = None) -> dict[str, Place]:
    """roles: role -> number of its processes, in the order in which devices are dealt out; "reward" gets none."""
    places: dict[str, Place] = {}
    first_device = 0
    for role, count in roles.items():
        if role == "reward":
            places[role] = Place(count, None, 1)
            continue
        # Trainer and critic learn at the same time; a reference's forward pass meets those of both.
        beside = {"reference": ENGINE_ROLES, "generator": ("generator",)}.get(role, ("trainer", "critic"))
        at_work = sum(roles.get(other, 0) for other in beside)
        places[role] = Place(count, first_device, max(1, (num_cores or os.cpu_count() or 1) // at_work))
        first_device += count
    return places
