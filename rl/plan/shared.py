"""Pass: whether each host's shared memory has room for the versions of the weights that it will have."""

from collections.abc import Mapping

from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, Facts
from rl.plan.fit import host_name
from rl.plan.memory import GIB
from rl.plan.model_shape import BYTES
from rl.plan.numerics import Numerics
from rl.plan.places import Places
from rl.plan.types import Notes

_PUBLISHED_ONCE = 1
_WRITTEN_AND_READ = 2
_WHILE_READ = 3
"""Versions at a time: weight_sync/store.py. Without overlap, the one before is read by nobody."""


def published_bytes(demand: Demand, facts: Facts, numerics: Numerics, places: Places) -> Mapping[int, float]:
    """Host -> what versions of the weights take in its shared memory at most.

    Empty where they are not there, or the model's size is not known.
    """
    shape, generators = facts.models["trainer"].shape, {place.host for place in places.of("generator")}
    if shape is None or not generators or demand.transport != "shared_memory":
        return {}
    num_versions = _WHILE_READ if demand.overlap else _WRITTEN_AND_READ
    if not demand.learns:
        num_versions = _PUBLISHED_ONCE
    whole, of_rank_0 = float(num_versions * shape.num_parameters * BYTES[numerics.dtype]), 0.0
    if (adapter := demand.learned_adapters).rank:  # beside the model that they were made for
        whole /= num_versions
        of_rank_0 = num_versions * shape.adapter_elements(adapter) * BYTES[numerics.dtype]
    ranks = [place.host for place in places.of("trainer")]
    first = ranks[0]
    ranks = ranks[: max(1, len(ranks) // demand.trainer.layout.replicate)]  # the others have the same
    return {
        host: whole + of_rank_0
        if host in generators
        else whole * ranks.count(host) / len(ranks) + of_rank_0 * (host == first)
        for host in sorted({*ranks, *generators})
    }


def check_shared_memory(
    demand: Demand, published: Mapping[int, float], cluster: Cluster, notes: Notes
) -> None:
    """published: as of `published_bytes`. Hosts whose shared memory is not known are taken to have enough."""
    for number, needed in published.items():
        capacity = cluster.hosts[number].shared_gib
        if capacity is not None and needed / GIB > capacity:
            where = host_name(number, cluster) if len(cluster.hosts) > 1 else "this host"
            otherwise = "" if demand.command == "serve" else ", or use --weight_sync.transport torchstore"
            notes.problem(
                f"{where} has {capacity:.2f} GiB of shared memory, and published weights take "
                f"{needed / GIB:.2f}; enlarge /dev/shm (docker run --shm-size=...){otherwise}",
            )
