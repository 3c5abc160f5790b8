"""A server's memory: what its processes take, and the cache that is left; before any of them starts."""

import math
from collections.abc import Mapping
from dataclasses import replace

from rl.cluster.actor_specs import ActorSpecs
from rl.cluster.machine import Machine
from rl.controller.memory_plan import USABLE, cache_left, num_device_procs, on_devices, placed, with_budgets
from rl.errors import ConfigError
from rl.models.hf import read_config
from rl.plan.memory import (
    GIB,
    Memory,
    ModelShape,
    engine_memory,
    generator_memory,
    longest_sequence_bytes,
)
from rl.types import LoRA

_REMEDY = "use a smaller model, context_length, limits.max_rank or limits.max_models, or more"
_CPU_CACHE_GIB = 0.25
_BYTES = {"float32": 4, "bfloat16": 2}


def fit_memory(specs: ActorSpecs, machine: Machine) -> ActorSpecs:
    """The specs, with a cache where none is asked for on a CPU or a shared GPU, and who shares GPUs.

    Raises ConfigError where the layout needs more GPUs than there are, where memory is too small for what is
    planned, and where the cache that is asked for is below one sequence.
    """
    num_gpus, num_ranks = len(machine.gpus), specs.roles["trainer"]
    if machine.gpus and num_ranks > num_gpus:
        raise ConfigError(
            f"the layout has {num_ranks} processes and the machine {num_gpus} GPUs: those of one engine "
            f"cannot share; use fewer"
        )
    shared = bool(machine.gpus) and num_device_procs(specs.roles) > num_gpus
    try:
        needed = longest_sequence_bytes(_shape(specs), specs.generator) / GIB
    except ConfigError:
        if shared:
            raise
        # No decoder of equal layers: its sizes are not known, and nothing is claimed.
        return specs if machine.gpus else _with_cache(specs, _CPU_CACHE_GIB)
    asked = specs.generator.kv_cache_gib
    if asked is not None and asked < needed:
        raise ConfigError(
            f"kv_cache_gib={asked:g} is less than one sequence of {specs.generator.max_model_len} tokens "
            f"takes, {needed:.2g} GiB; raise it, or lower context_length"
        )
    if not machine.gpus:
        return _in_main_memory(_with_cache(specs, max(_CPU_CACHE_GIB, needed)), machine, asked)
    if not shared:
        with_one_sequence = _with_cache(specs, needed)  # vLLM takes what is left, at least this
        _check_gpus(with_one_sequence, _memories(with_one_sequence, machine), machine, asked)
        return specs
    return _on_shared_gpus(specs, machine, needed)


def _on_shared_gpus(specs: ActorSpecs, machine: Machine, needed: float) -> ActorSpecs:
    """needed: GiB of the cache of one sequence."""
    asked = specs.generator.kv_cache_gib
    if asked is None:
        left = cache_left(placed(specs.roles, _memories(specs, machine), machine, shared=True), machine)
        if left < needed:
            raise ConfigError(
                f"trainer and generators share {len(machine.gpus)} x {machine.gpus[0].gib:.1f} GiB of GPU "
                f"memory, {_tenths(needed - left)} GiB short of a cache for one sequence on each generator; "
                f"{_REMEDY} GPUs"
            )
        specs = _with_cache(specs, left)
    memories = _memories(specs, machine)
    _check_gpus(specs, memories, machine, asked)
    return with_budgets(replace(specs, share_devices=True), memories, machine)


def _in_main_memory(specs: ActorSpecs, machine: Machine, asked: float | None) -> ActorSpecs:
    """asked: for the cache."""
    memories = {role: memory.total / GIB for role, memory in _memories(specs, machine).items()}
    counts = {role: specs.roles[role] for role in memories}
    planned = sum(counts[role] * memory for role, memory in memories.items())
    if planned > machine.free_gib:
        parts = ", ".join(f"{role} {counts[role]} x {memory:.1f}" for role, memory in memories.items())
        raise ConfigError(
            f"the server needs about {planned:.1f} GiB ({parts}; a generator's cache is "
            f"{specs.generator.kv_cache_gib:.2g}) but {machine.free_gib:.1f} are free, "
            f"{_tenths(planned - machine.free_gib)} GiB short; {_lower_cache(asked)}{_REMEDY} memory"
        )
    return specs


def _check_gpus(
    specs: ActorSpecs, memories: Mapping[str, Memory], machine: Machine, asked: float | None
) -> None:
    """Raises ConfigError where a GPU has less than is planned for its processes, with the GPU's shortfall.

    memories: of each process of a role. asked: for the cache.
    """
    for device, sharing in on_devices(placed(specs.roles, memories, machine, shared=True)).items():
        room = machine.gpus[device].gib * USABLE
        planned = sum(process.memory.total for process in sharing) / GIB
        if planned > room:
            processes = ", ".join(f"{process.role} {process.memory.total / GIB:.1f}" for process in sharing)
            raise ConfigError(
                f"GPU {device} has {room:.1f} GiB for processes that need about {planned:.1f} ({processes}), "
                f"{_tenths(planned - room)} GiB short; {_lower_cache(asked)}{_REMEDY} GPUs"
            )


def _lower_cache(asked: float | None) -> str:
    return "" if asked is None else "lower kv_cache_gib, or "


def _tenths(gib: float) -> str:
    """Rounded up, so that a shortfall is never 0."""
    return f"{math.ceil(gib * 10) / 10:.1f}"


def _with_cache(specs: ActorSpecs, gib: float) -> ActorSpecs:
    """Of this size where none is asked for."""
    if specs.generator.kv_cache_gib is not None:
        return specs
    return replace(specs, generator=replace(specs.generator, kv_cache_gib=gib))


def _shape(specs: ActorSpecs) -> ModelShape:
    return ModelShape.of(read_config(specs.trainer.model_dir))


def _memories(specs: ActorSpecs, machine: Machine) -> dict[str, Memory]:
    """Of each process, with as many adapters of the largest rank as it may hold."""
    shape, generator, on_cpu = _shape(specs), specs.generator, not machine.gpus
    all_adapters = LoRA(rank=generator.max_lora_rank * generator.max_adapters)
    adapters = shape.adapter_elements(all_adapters) * _BYTES[generator.dtype]
    parts = generator_memory(shape, generator, on_cpu).parts
    return {
        "trainer": engine_memory(shape, specs.trainer.config, all_adapters, learns=True, on_cpu=on_cpu),
        "generator": Memory({**parts, "adapters": adapters}),
    }
