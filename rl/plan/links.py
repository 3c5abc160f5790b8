"""Passes: what goes from role to role, whether it comes in time, and whether whole or as what changed."""

from collections.abc import Iterable
from typing import Literal

from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, Facts
from rl.plan.model_shape import BYTES
from rl.plan.numerics import Numerics
from rl.plan.places import Places
from rl.plan.roles import RoleName
from rl.plan.types import Link, Notes

_ROLES: tuple[RoleName, RoleName] = ("trainer", "generator")
_CORES = 4
"""Each of the connections of a fetch uses one on both hosts (weight_sync/remote_files.py)."""
_GB_PER_S = 0.6
"""With which a core finds out, or applies, what changed: docs/weight_delta.md."""


def links(demand: Demand, facts: Facts, numerics: Numerics) -> tuple[Link, ...]:
    ways: list[Link] = []
    shape, lora = facts.models["trainer"].shape, demand.trainer.lora
    if demand.generator is not None:
        elements = 0 if shape is None else shape.adapter_elements(lora) if lora.rank else shape.num_parameters
        carries: Literal["adapter", "weights"] = "adapter" if lora.rank else "weights"
        num_bytes = elements * BYTES[numerics.dtype]
        ways.append(Link("trainer", "generator", carries, demand.transport, num_bytes))
    if demand.judge is not None:
        ways.append(Link("reward", "judge", "questions", "http", 0))
    return tuple(ways)


def check_loads(demand: Demand, ways: Iterable[Link], places: Places, cluster: Cluster, notes: Notes) -> None:
    """Whether a whole version, as the first one is, reaches the generators' hosts in time. All fetch it at
    once, from each host of the trainer its part."""
    sources, targets = ({place.host for place in places.of(role)} for role in _ROLES)
    away = sorted(targets - sources)
    rates = [rate for host in away if (rate := cluster.hosts[host].gb_per_s) is not None]
    size = sum(way.bytes for way in ways if way.target == "generator")
    if demand.transport != "shared_memory" or not rates:
        return
    seconds = size / 1e9 * len(away) / (len(sources) * min(rates))
    if seconds > demand.deadlines.load:
        to = f"host {away[0]}" if len(away) == 1 else f"{len(away)} hosts at once"
        notes.problem(
            f"weights of {size / 2**30:.1f} GiB take about {seconds:.0f} s to {to}, over links of "
            f"{min(rates):.2g} GB/s, and deadlines.load is {demand.deadlines.load:g} s; set --deadlines.load "
            f"{_rounded(2 * seconds)}, or put fewer generators on other hosts",
        )


def _rounded(seconds: float) -> int:
    """Up, to whole minutes."""
    return 60 * -(-int(seconds) // 60)


def settle_delta(demand: Demand, numerics: Numerics, places: Places, cluster: Cluster, notes: Notes) -> bool:
    """Whether what changed goes from host to host in the place of whole weights."""
    asked, on = demand.delta, {place.host for role in _ROLES for place in places.of(role)}
    has_none = _has_none(demand, numerics, places)
    if asked == "on" and has_none and demand.command == "train":  # others take a run's setting as it is
        notes.problem(f"weight_sync.delta=on has no effect: {has_none}; leave it out")
    if has_none:
        if demand.generator is not None:
            notes.settle("weight_sync.delta", asked, "off", has_none)
        return False
    if asked != "auto":
        notes.settle("weight_sync.delta", asked, asked, "asked for")
        return asked == "on"
    hosts = [cluster.hosts[number] for number in sorted(on)]
    rates = [host.gb_per_s for host in hosts if host.gb_per_s is not None]
    if not rates:
        notes.settle("weight_sync.delta", asked, "off", "the links were not measured")
        return False
    of_cores = _GB_PER_S * min(_CORES, *(host.num_cores for host in hosts))
    is_slow = min(rates) < of_cores
    why = f"the slowest link carries {min(rates):.2g} GB/s, and differences are made at {of_cores:.2g}"
    notes.settle("weight_sync.delta", asked, "on" if is_slow else "off", why)
    return is_slow


def _has_none(demand: Demand, numerics: Numerics, places: Places) -> str:
    """Why no difference can go from host to host; empty where one can."""
    sources, targets = ({place.host for place in places.of(role)} for role in _ROLES)
    if len(sources | targets) < 2 or not targets:
        return "no generator reads weights of another host"
    if demand.transport != "shared_memory":
        return f"weight_sync.transport={demand.transport} sends whole weights"
    if demand.learned_adapters.rank:
        return "an adapter is sent whole"
    if numerics.dtype != "bfloat16":
        return f"with dtype={numerics.dtype} nearly every value changes in a step"
    return ""
