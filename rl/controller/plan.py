"""`rl plan RECIPE [--devices 8xH100-80]`: memory of each role, what does not fit, and what would make it."""

from collections.abc import Sequence

from rl.cluster.machine import Machine, parse_machine, this_machine
from rl.controller.config import RunConfig
from rl.controller.device_defaults import by_device
from rl.controller.device_rules import check_devices
from rl.controller.memory_plan import USABLE, Process, on_devices, processes, sync_bytes
from rl.controller.recipes import load_recipe
from rl.controller.settings import override
from rl.errors import ConfigError
from rl.fields import check_fields
from rl.plan.memory import GIB

_USAGE = "usage: rl plan RECIPE [--devices 8xH100-80 | cpu] [--section.field value ...]"
_PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "head",
    "loading",
    "cache",
    "overhead",
)


def plan(arguments: Sequence[str]) -> int:
    """Print the plan. Returns 0 where the run fits, 1 where it does not. Raises ConfigError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    name, *rest = arguments
    machine = this_machine()
    if "--devices" in rest:
        i = rest.index("--devices")
        if i + 1 == len(rest):
            raise ConfigError("--devices needs a value; write --devices 8xH100-80")
        machine = parse_machine(rest[i + 1])
        del rest[i : i + 2]
    recipe, config = load_recipe(name)
    config, misread = override(config, rest, prog=f"rl plan {name}")
    config, wrong = check_fields(config)
    if misread or wrong:
        raise ConfigError("\n".join([*misread, *wrong]))
    lines, fits = describe(recipe, config, machine)
    print("\n".join(lines))
    return 0 if fits else 1


def describe(recipe: str, config: RunConfig, machine: Machine) -> tuple[list[str], bool]:
    """The lines, and whether the run fits."""
    config = by_device(config, machine)
    planned = processes(config, machine)
    lines = [f"{recipe} on {_name(machine)}, {config.dtype}, GiB of each process:", ""]
    lines += _table(planned)
    lines.append("")
    if machine.gpus:
        used = on_devices(planned)
        if idle := [str(i) for i in range(len(machine.gpus)) if i not in used]:
            lines.append(
                f"GPU {', '.join(idle)}: nothing runs there; use them with --trainer.layout.shard or "
                f"--generator.num_replicas"
            )
        for device, those in used.items():
            if device >= len(machine.gpus):  # the problems say so
                continue
            room = machine.gpus[device].gib * USABLE
            needed = sum(process.memory.total for process in those) / GIB
            takes_rest = any(p.role == "generator" for p in those) and not config.generator.kv_cache_gib
            rest = f"; vLLM takes the other {room - needed:.1f} for its cache" * (
                takes_rest and needed < room
            )
            who = ", ".join(f"{process.role} {process.rank}" for process in those)
            lines.append(f"GPU {device}: {needed:.1f} of {room:.1f} GiB ({who}){rest}")
    else:
        needed = sum(process.memory.total for process in planned) / GIB
        lines.append(f"host: {needed:.1f} of {machine.free_gib:.1f} GiB free")
    lines.append(
        f"weight sync: {sync_bytes(config) / GIB:.2f} GiB a version, through /dev/shm, which holds three"
    )
    found = check_devices(config, machine)
    lines += [f"problem: {problem}" for problem in found] or ["it fits"]
    return lines, not found


def _name(machine: Machine) -> str:
    if not machine.gpus:
        return f"{machine.num_cores} cores with {machine.free_gib:.0f} GiB free"
    gpu = machine.gpus[0]
    return f"{len(machine.gpus)} x {gpu.name} of {gpu.gib:.1f} GiB"


def _table(planned: Sequence[Process]) -> list[str]:
    """A row for each role: its processes are alike."""
    roles: dict[str, list[Process]] = {}
    for process in planned:
        roles.setdefault(process.role, []).append(process)
    rows = [["role", "processes", "on", *_PARTS, "total"]]
    for role, those in roles.items():
        parts = those[0].memory.parts
        devices = ",".join("-" if p.device is None else str(p.device) for p in those)
        figures = [f"{parts[part] / GIB:.2f}" if part in parts else "" for part in _PARTS]
        where = devices if those[0].device is not None else "CPU"
        rows.append([role, str(len(those)), where, *figures, f"{those[0].memory.total / GIB:.2f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
