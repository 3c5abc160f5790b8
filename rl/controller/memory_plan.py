"""What a run's processes take of each device's memory, before anything starts.

The figures of `rl plan`, of validation, and of a cache that shares its GPU.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from rl.cluster.actor_specs import ActorSpecs
from rl.cluster.machine import Machine
from rl.cluster.placement import ENGINE_ROLES, place
from rl.controller.config import RunConfig
from rl.controller.specs import (
    critic_config,
    generator_config,
    judge_config,
    reference_config,
    roles,
    trainer_config,
)
from rl.plan.memory import GIB, Memory, ModelShape, engine_memory, generator_memory
from rl.types import LoRA

USABLE = 0.92
"""The share of a GPU's memory that is planned with, as vLLM's."""
_MARGIN = 1.1  # for engines that share a GPU: what arithmetic does not see


@dataclass(frozen=True)
class Process:
    """One process that needs a device."""

    role: str
    rank: int  # among the role's
    device: int | None  # None on a CPU
    memory: Memory


def shares_devices(config: RunConfig, machine: Machine, without: Collection[str] = ()) -> bool:
    """Whether roles share GPUs: asked for, or because there are fewer than processes that need one."""
    if not machine.gpus or config.placement == "shared":
        return bool(machine.gpus)
    return config.placement == "auto" and num_device_procs(roles(config, without)) > len(machine.gpus)


def num_device_procs(started: Mapping[str, int]) -> int:
    """Processes that need a device. started: role -> number of processes."""
    return sum(count for role, count in started.items() if role != "reward")


def role_memories(config: RunConfig, machine: Machine) -> dict[str, Memory]:
    """Role -> the memory of each of its processes. The config's settings by device are known.

    Raises ConfigError where a config.json does not tell the sizes of a decoder.
    """
    on_cpu = not machine.gpus
    shape, lora, started = ModelShape.of(config.model.config()), config.trainer.lora, roles(config)
    trainer, generator = trainer_config(config), generator_config(config)
    memories = {
        "trainer": engine_memory(shape, trainer, lora, learns=True, on_cpu=on_cpu),
        "generator": generator_memory(shape, generator, on_cpu),
    }
    if "critic" in started:
        memories["critic"] = engine_memory(shape, critic_config(config), LoRA(), learns=True, on_cpu=on_cpu)
    if "reference" in started:
        teacher = ModelShape.of((config.reference.model or config.model).config())
        memories["reference"] = engine_memory(teacher, reference_config(config), LoRA(), False, on_cpu)
    if (judge := judge_config(config)) is not None:
        assert config.judge.model is not None
        memories["judge"] = generator_memory(ModelShape.of(config.judge.model.config()), judge, on_cpu)
    return memories


def processes(config: RunConfig, machine: Machine, without: Collection[str] = ()) -> list[Process]:
    """All of a run that need a device, in the order in which devices are dealt out.

    without: roles that are not started.
    """
    started, shared = roles(config, without), config.placement == "shared"
    return placed(started, role_memories(config, machine), machine, shared)


def placed(
    started: Mapping[str, int], memories: Mapping[str, Memory], machine: Machine, shared: bool
) -> list[Process]:
    """started: role -> number of processes, all of which are placed. memories: of each process of a role."""
    places = place(started, machine.num_cores, num_devices=len(machine.gpus), shared=shared)
    planned = []
    for role, where in places.items():
        if role != "reward":
            devices = where.devices if machine.gpus else (None,) * where.num_procs
            planned += [Process(role, i, device, memories[role]) for i, device in enumerate(devices)]
    return planned


def on_devices(planned: list[Process]) -> Mapping[int, list[Process]]:
    """Device -> the processes that share it."""
    found: dict[int, list[Process]] = {}
    for process in planned:
        if process.device is not None:
            found.setdefault(process.device, []).append(process)
    return found


def cache_left(planned: list[Process], machine: Machine) -> float:
    """GiB for the cache of each generator that shares its GPU; under 0 where there is none: by how much."""
    left = math.inf
    for device, those in on_devices(planned).items():
        if (num_caches := sum(p.role == "generator" for p in those)) == 0:
            continue
        engines = sum(p.memory.total for p in those if p.role != "generator") * _MARGIN
        generators = sum(p.memory.total for p in those if p.role == "generator")
        room = machine.gpus[device].gib * USABLE * GIB
        left = min(left, (room - engines - generators) / num_caches)
    gib = math.floor(left / GIB * 10) / 10
    return gib if gib > 0 else min(gib, -0.1)


def with_budgets(specs: ActorSpecs, memories: Mapping[str, Memory], machine: Machine) -> ActorSpecs:
    """Engines that share GPUs may take what is planned for nobody else that is started.

    memories: of each process of a role.
    """
    budgets: dict[str, float] = {}
    for device, those in on_devices(placed(specs.roles, memories, machine, shared=True)).items():
        room = machine.gpus[device].gib * USABLE
        for process in those:
            others = sum(p.memory.total for p in those if p is not process) / GIB
            budgets[process.role] = min(budgets.get(process.role, math.inf), room - others)
    for role in ENGINE_ROLES:
        if (spec := getattr(specs, role)) is not None:
            limited = replace(spec.config, device_memory_gib=budgets[role])
            specs = replace(specs, **{role: replace(spec, config=limited)})
    return specs


def sync_bytes(config: RunConfig) -> float:
    """Of one published version: the model's, or the adapter's where one learns."""
    shape = ModelShape.of(config.model.config())
    lora = config.trainer.lora
    elements = shape.adapter_elements(lora) if lora.rank else shape.num_parameters
    return elements * (4 if config.dtype == "float32" else 2)
