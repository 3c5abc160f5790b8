"""What a run's processes take of each device's memory, before anything starts.

The figures of `rl plan`, of validation, and of a cache that shares its GPU.
"""

import math
from collections.abc import Mapping
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
from rl.models.memory import GIB, Memory, ModelShape, engine_memory, generator_memory
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


def shares_devices(config: RunConfig, machine: Machine) -> bool:
    """Whether roles share GPUs: asked for, or because there are fewer than processes that need one."""
    if not machine.gpus or config.placement == "shared":
        return bool(machine.gpus)
    return config.placement == "auto" and num_device_procs(config) > len(machine.gpus)


def num_device_procs(config: RunConfig) -> int:
    """Processes that need a device."""
    return sum(count for role, count in roles(config).items() if role != "reward")


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


def processes(config: RunConfig, machine: Machine) -> list[Process]:
    """All that need a device, in the order in which devices are dealt out."""
    memories = role_memories(config, machine)
    shared = config.placement == "shared"
    places = place(roles(config), machine.num_cores, num_devices=len(machine.gpus), shared=shared)
    found = []
    for role, where in places.items():
        if role != "reward":
            devices = where.devices if machine.gpus else (None,) * where.num_procs
            found += [Process(role, i, device, memories[role]) for i, device in enumerate(devices)]
    return found


def on_devices(planned: list[Process]) -> Mapping[int, list[Process]]:
    """Device -> the processes that share it."""
    found: dict[int, list[Process]] = {}
    for process in planned:
        if process.device is not None:
            found.setdefault(process.device, []).append(process)
    return found


def cache_left(config: RunConfig, machine: Machine) -> float:
    """GiB for the cache of each generator that shares its GPU; under 0 where there is none: by how much."""
    left = math.inf
    for device, those in on_devices(processes(config, machine)).items():
        if (num_caches := sum(p.role == "generator" for p in those)) == 0:
            continue
        engines = sum(p.memory.total for p in those if p.role != "generator") * _MARGIN
        generators = sum(p.memory.total for p in those if p.role == "generator")
        room = machine.gpus[device].gib * USABLE * GIB
        left = min(left, (room - engines - generators) / num_caches)
    gib = math.floor(left / GIB * 10) / 10
    return gib if gib > 0 else min(gib, -0.1)


def with_budgets(specs: ActorSpecs, config: RunConfig, machine: Machine) -> ActorSpecs:
    """Engines that share a GPU may take what is planned for nobody else."""
    if config.placement != "shared" or not machine.gpus:
        return specs
    budgets: dict[str, float] = {}
    for device, those in on_devices(processes(config, machine)).items():
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
