"""A Plan for people, and as JSON."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.models.generator.vllm_config import Fill
from rl.paths import write_whole
from rl.plan.cluster import USABLE, Cluster
from rl.plan.fit import at_a_time, host_name
from rl.plan.memory import GIB, Memory
from rl.plan.roles import ROLES
from rl.plan.types import PHASES, VERSION, EngineSpec, GeneratorSpec, Phase, Plan, Process, Replica

_HELD = ("weights", "optimizer", "adapters")
"""Of an engine, between steps."""
_SWITCH_GPU, _SWITCH_CPU = (7.0, 18.0), (0.3, 0.9)
"""GiB/s away and back: of 6.7 GiB on an H200 in 0.97 and 0.37 s; of 1.5 on an EPYC in 4.7 and 1.6 s, where
they went to a file."""
PLAN = "plan.json"
"""What a command settled, in its directory."""
_PARTS = (
    "weights", "gradients", "optimizer", "gathered", "activations", "head", "checkpoint", "loading",
    "adapters", "cache", "overhead",
)  # fmt: skip


def show(title: str, plan: Plan) -> list[str]:
    """One line for each role, device, link, and settled value."""
    dtype = plan.value_of("dtype")
    lines = [f"{title} on {plan.cluster}, {dtype}, GiB of each process:", "", *_table(plan), ""]
    lines += _idle(plan)
    if not any(process.memory for replica in plan.replicas for process in replica.processes):
        lines.append("the model's config.json gives no sizes of a decoder: nothing is claimed of its memory")
    else:
        lines += _devices(plan) if plan.cluster.gpus else _host(plan)
        lines += _switches(plan)
    for link in plan.links:
        if link.carries != "questions" and link.bytes:
            through = "/dev/shm" if link.transport == "shared_memory" else link.transport
            lines.append(
                f"weight sync: {link.bytes / GIB:.2f} GiB a version, through {through}, "
                f"which holds three at most"
            )
    lines += ["", "settled:", *_settled(plan)]
    return lines


def _settled(plan: Plan) -> list[str]:
    width = max((len(s.setting) for s in plan.settled), default=0)
    return [f"  {s.setting:{width}} {s.value}  ({s.why})" for s in plan.settled]


def _table(plan: Plan) -> list[str]:
    """A row for each role: its processes are alike."""
    parts = [part for part in _PARTS if any(part in _peak(r.processes[0]).parts for r in plan.replicas)]
    rows = [["role", "processes", "on", *parts, "total"]]
    for role, count in plan.roles.items():
        if ROLES[role].kind == "worker":
            continue
        replicas = plan.of(role)
        memory = _peak(replicas[0].processes[0]).parts
        where = ",".join(_where(p, plan.cluster) for r in replicas for p in r.processes)
        if not plan.cluster.gpus and len(plan.cluster.hosts) == 1:
            where = "CPU"
        figures = [f"{memory[part] / GIB:.2f}" if part in memory else "" for part in parts]
        rows.append([role, str(count), where, *figures, f"{sum(memory.values()) / GIB:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _peak(process: Process) -> Memory:
    return max(process.memory.values(), key=lambda memory: memory.total, default=Memory({}))


def _where(process: Process, cluster: Cluster) -> str:
    device = ",".join(map(str, process.gpus))
    return device if len(cluster.hosts) == 1 else f"{process.host}:{device or 'CPU'}"


def _idle(plan: Plan) -> list[str]:
    used = {(p.host, gpu) for replica in plan.replicas for p in replica.processes for gpu in p.gpus}
    idle = [(host, gpu) for host, gpu in plan.cluster.devices if (host, gpu) not in used]
    if not idle:
        return []
    is_one_host = len(plan.cluster.hosts) == 1
    names = ", ".join(str(gpu) if is_one_host else f"{host}:{gpu}" for host, gpu in idle)
    return [
        f"GPU {names}: nothing runs there; use them with --trainer.layout.shard or --generator.num_replicas"
    ]


def _devices(plan: Plan) -> list[str]:
    ranks_on: dict[tuple[int, int], list[tuple[Replica, int]]] = {}
    for replica in plan.replicas:
        for rank, process in enumerate(replica.processes):
            for gpu in process.gpus:
                ranks_on.setdefault((process.host, gpu), []).append((replica, rank))
    lines = []
    for (host, gpu), members in sorted(ranks_on.items()):
        room = plan.cluster.hosts[host].gpus[gpu].gib * USABLE
        needed = _by_phase(members)
        names = ", ".join(f"{r.name}{f' rank {i}' if len(r.processes) > 1 else ''}" for r, i in members)
        fills = [cache for r, _ in members if (cache := _fill(r))]
        of_cache = f"; of it {fills[0].expected_gib:.1f} for the cache: what vLLM finds free" if fills else ""
        name = f"GPU {gpu}" if len(plan.cluster.hosts) == 1 else f"GPU {host}:{gpu}"
        lines.append(f"{name}: {needed} of {room:.1f} GiB ({names}){of_cache}")
    return lines


def _fill(replica: Replica) -> Fill | None:
    if not isinstance(replica.spec, GeneratorSpec):
        return None
    cache = replica.spec.config.kv_cache_gib
    return cache if isinstance(cache, Fill) else None


def _sum(members: Sequence[tuple[Replica, int]], phase: Phase) -> float:
    """GiB, as `check_fit` counts them."""
    memory = {r.role: r.processes[i].memory[phase] for r, i in members if r.processes[i].memory}
    return at_a_time(memory, [r.role for r, i in members if r.processes[i].memory]) / GIB


def _host(plan: Plan) -> list[str]:
    lines = []
    for number, host in enumerate(plan.cluster.hosts):
        members = [(r, i) for r in plan.replicas for i, p in enumerate(r.processes) if p.host == number]
        name = "host" if len(plan.cluster.hosts) == 1 else host_name(number, plan.cluster)
        lines.append(f"{name}: {_by_phase(members)} of {host.free_gib:.1f} GiB free")
    return lines


def _by_phase(members: Sequence[tuple[Replica, int]]) -> str:
    """GiB of these processes: one figure where it is the same in all phases."""
    taken = {phase: _sum(members, phase) for phase in PHASES}
    if len({f"{gib:.1f}" for gib in taken.values()}) == 1:
        return f"{max(taken.values()):.1f}"
    return ", ".join(f"{phase} {gib:.1f}" for phase, gib in taken.items())


def _switches(plan: Plan) -> list[str]:
    """By turns: what engines have away from their devices goes to the host and comes back, once a step."""
    if len({stay.whole for stay in plan.stays}) == 1:
        return []
    by_device: dict[tuple[int, tuple[int, ...]], float] = {}
    for replica in plan.replicas:
        for process in replica.processes if isinstance(replica.spec, EngineSpec) else ():
            memory = _peak(process)
            held = sum(memory.parts.get(part, 0.0) for part in _HELD) - memory.kept
            device = process.host, process.gpus
            by_device[device] = by_device.get(device, 0.0) + held
    most, on_gpu = max(by_device.values()) / GIB, bool(plan.cluster.gpus)
    away, back = _SWITCH_GPU if on_gpu else _SWITCH_CPU
    page = "docs/gpu.md" if on_gpu else "docs/turns.md"
    return [
        f"a switch: at most {most:.1f} GiB of engines leave a device in about {most / away:.1f} s, and come "
        f"back in about {most / back:.1f} s, as fast as was measured ({page})"
    ]


def write_plan(file: Path, plan: Plan) -> None:
    write_whole(file, json.dumps(plan_json(plan), indent=1).encode())


def settled_line(plan: Plan, file: Path) -> str:
    """What is not as it was asked for, on one line. file: of the Plan, which says why."""
    values = [f"{one.setting}={one.value}" for one in plan.settled if one.value != one.asked]
    return f"settled: {', '.join(values)} (why: {file})"


def plan_json(plan: Plan) -> dict[str, Any]:
    return {"version": VERSION, **dataclasses.asdict(plan)}


def differences(before: Mapping[str, Any], plan: Plan, run: str) -> list[str]:
    """What a run settled otherwise, one line each. before: the run's plan.json."""
    old = {s["setting"]: s for s in before["settled"]}
    new = {s.setting: s for s in plan.settled}
    lines = [
        f"{name}: {old[name]['value']} in {run} ({old[name]['why']}), {new[name].value} now ({new[name].why})"
        for name in old.keys() & new.keys()
        if old[name]["value"] != new[name].value
    ]
    lines += [f"{name}: {old[name]['value']} in {run}, not there now" for name in old.keys() - new.keys()]
    lines += [f"{name}: not there in {run}, {new[name].value} now" for name in new.keys() - old.keys()]
    return sorted(lines) or [f"settled as in {run}"]
