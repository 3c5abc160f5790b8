"""Pass: in which numbers, and by which kernels, a run computes on these devices."""

from dataclasses import dataclass
from typing import Literal

from rl.plan.cluster import GPU, Cluster
from rl.plan.demand import Demand, Facts
from rl.plan.roles import ENGINE_ROLES, ROLES
from rl.plan.types import Notes

_BFLOAT16 = (8, 0)  # compute capabilities from which on GPUs have it
_FLOAT8 = (8, 9)
_WIDE = 256  # of a model's hidden states


@dataclass(frozen=True)
class Numerics:
    dtype: Literal["float32", "bfloat16"]
    cuda_graphs: bool


def settle_numerics(demand: Demand, facts: Facts, cluster: Cluster, notes: Notes) -> Numerics:
    numerics = Numerics(_dtype(demand, facts, cluster, notes), _cuda_graphs(demand, cluster, notes))
    if cluster.gpus:
        _check_capability(demand, numerics.dtype, cluster, notes)
    _check_compile(demand, numerics.dtype, cluster, notes)
    if demand.trainer.float8 and "torchao" not in facts.packages and _may_have_float8(cluster):
        notes.problem("trainer.float8=True needs torchao; install it: pip install torchao==0.18.0")
    return numerics


def _may_have_float8(cluster: Cluster) -> bool:
    """A CPU emulates it."""
    return all(gpu.capability >= _FLOAT8 for gpu in cluster.gpus)


def _dtype(demand: Demand, facts: Facts, cluster: Cluster, notes: Notes) -> Literal["float32", "bfloat16"]:
    value: Literal["float32", "bfloat16"]
    slow = _without_bfloat16(demand, cluster)
    match demand.dtype:
        case "float32" | "bfloat16" as asked:
            value, why = asked, "asked for"
            if asked == "bfloat16" and slow and _is_wide(facts):
                notes.problem(
                    f"{demand.name('dtype')}=bfloat16 takes many times as long as float32 on {slow}, whose "
                    f"CPU has no instructions for it; set it to float32, or use hosts that have them",
                )
        case "auto" if not cluster.gpus:
            value, why = "float32", "a CPU multiplies 32 bits as fast"
        case "fastest" if slow:
            value, why = "float32", f"the CPU of {slow} has no instructions for bfloat16"
        case "fastest" if not cluster.gpus:
            value, why = "bfloat16", "with instructions for it a CPU is faster; what learns is fp32"
        case "fastest" if min(gpu.capability for gpu in cluster.gpus) < _BFLOAT16:
            value, why = "float32", "these GPUs have no bfloat16"
        case _:
            value, why = "bfloat16", "GPUs multiply 16 bits many times faster; what learns is fp32"
    notes.settle("dtype", demand.dtype, value, why)
    return value


def _without_bfloat16(demand: Demand, cluster: Cluster) -> str:
    """Where models run on CPUs: the first host that is known to have no instructions for it."""
    if cluster.gpus:
        return ""
    everywhere = range(len(cluster.hosts))
    roles = [role for role in ROLES if ROLES[role].kind != "worker" and ROLES[role].size(demand)]
    numbers = sorted({number for role in roles for number in demand.hosts.get(role) or everywhere})
    lacking = [cluster.hosts[n] for n in numbers if n in everywhere and cluster.hosts[n].bfloat16 is False]
    return next((f"host {host.address}" if host.address else "this host" for host in lacking), "")


def _is_wide(facts: Facts) -> bool:
    """Has matrices with which a CPU is busy for long, or may have. Small ones it multiplies well enough."""
    return any(model.shape is None or model.shape.dim >= _WIDE for model in facts.models.values())


def _cuda_graphs(demand: Demand, cluster: Cluster, notes: Notes) -> bool:
    if demand.generator is None:
        return bool(cluster.gpus)
    asked = demand.generator.cuda_graphs
    if asked == "on" and not cluster.gpus:
        notes.problem(f"{demand.name('generator.cuda_graphs')}=on needs a GPU; set it to off")
    if asked != "auto":
        notes.settle(demand.name("generator.cuda_graphs"), asked, asked, "asked for")
        return asked == "on"
    why = "without graphs the host is slower than the kernels" if cluster.gpus else "there is no GPU"
    notes.settle(demand.name("generator.cuda_graphs"), asked, "on" if cluster.gpus else "off", why)
    return bool(cluster.gpus)


def _check_capability(demand: Demand, dtype: str, cluster: Cluster, notes: Notes) -> None:
    weakest: GPU = min(cluster.gpus, key=lambda gpu: gpu.capability)
    is_old = f"this is a {weakest.name}, {weakest.capability[0]}.{weakest.capability[1]}"
    if dtype == "bfloat16" and weakest.capability < _BFLOAT16:
        notes.problem(
            f"dtype=bfloat16 needs GPUs of compute capability 8.0 or more ({is_old}); "
            + ("adapters need it: use newer GPUs" if _samples_adapters(demand) else "set --dtype float32"),
        )
    if dtype == "float32" and _samples_adapters(demand):
        remedy = "set it to bfloat16" if weakest.capability >= _BFLOAT16 else f"use newer GPUs ({is_old})"
        notes.problem(
            f"{demand.name('dtype')}=float32 does not go with adapters on a GPU, because vLLM's kernels take "
            f"16 bits; {remedy}",
        )
    if not demand.trainer.float8:
        return
    if not _may_have_float8(cluster):
        notes.problem(
            f"trainer.float8=True needs GPUs of compute capability 8.9 or more ({is_old}); set it to False",
        )
    elif not demand.trainer.compile:
        notes.problem(
            "trainer.float8=True without trainer.compile is slower than bfloat16 on a GPU; set "
            "--trainer.compile True",
        )


def _samples_adapters(demand: Demand) -> bool:
    return demand.generator is not None and demand.max_rank > 0


def _check_compile(demand: Demand, dtype: str, cluster: Cluster, notes: Notes) -> None:
    if not demand.trainer.compile:
        return
    layouts = [layout for role in ENGINE_ROLES if (layout := demand.layout(role))]
    if not cluster.gpus:
        notes.problem("trainer.compile=True needs a GPU; set it to False")
    elif dtype != "bfloat16" or max(layout.context_parallel for layout in layouts) > 1:
        notes.problem(
            "trainer.compile=True needs dtype=bfloat16 and no context parallelism; set it to False",
        )
