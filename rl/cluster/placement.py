"""Placement: which role has how many processes, on which devices, with how many threads. Pure functions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

ENGINE_ROLES = ("trainer", "critic", "reference")


@dataclass(frozen=True)
class Place:
    """Where the processes of a role run, on this host."""

    num_procs: int
    devices: tuple[int, ...]  # of each process, where there are GPUs; empty for a role that needs none
    num_threads: int  # of each process


def place(
    roles: Mapping[str, int],
    num_cores: int,
    threads: Mapping[str, int] | None = None,
    overlap: bool = False,
    num_devices: int = 0,
    shared: bool = False,
) -> dict[str, Place]:
    """Where the processes of each role run.

    roles: role -> number of its processes, in the order in which devices are dealt out; "reward" gets none.
    threads: role -> threads of each process; others share the cores with those that work at the same time.
    overlap: generators work at the same time as all others.
    shared: GPUs are dealt out in turn, so that processes of several roles may have the same.
    """
    places: dict[str, Place] = {}
    first_device = 0
    for role, count in roles.items():
        if role == "reward":
            places[role] = Place(count, (), 1)
            continue
        # Trainer and critic learn at the same time; a reference's forward pass meets those of both.
        peers: dict[str, Collection[str]] = {
            "reference": ENGINE_ROLES, "generator": ("generator",), "judge": ("judge",)
        }  # fmt: skip
        beside = peers.get(role, ("trainer", "critic"))
        if overlap:
            beside = {*beside, *(ENGINE_ROLES if role == "generator" else ("generator",))}
        at_work = sum(roles.get(other, 0) for other in beside)
        shared_out = max(1, num_cores // at_work)
        devices = tuple(range(first_device, first_device + count))
        if shared and num_devices:
            devices = tuple(device % num_devices for device in devices)
        places[role] = Place(count, devices, (threads or {}).get(role) or shared_out)
        first_device += count
    return places
