"""A server on fewer GPUs than it has processes: who shares which, and how much memory each may take."""

import math
from collections.abc import Mapping
from dataclasses import replace

from rl.cluster.actor_specs import ActorSpecs
from rl.cluster.machine import Machine
from rl.controller.memory_plan import USABLE, cache_left, num_device_procs, on_devices, placed, with_budgets
from rl.errors import ConfigError
from rl.models.hf import read_config
from rl.models.memory import (
    GIB,
    Memory,
    ModelShape,
    engine_memory,
    generator_memory,
    longest_sequence_bytes,
)
from rl.types import LoRA

_REMEDY = "use a smaller model, context_length, limits.max_rank or limits.max_models, or more GPUs"
_BYTES = {"float32": 4, "bfloat16": 2}


def share_gpus(specs: ActorSpecs, machine: Machine) -> ActorSpecs:
    """The specs as they are where each process has a GPU of its own.

    Raises ConfigError where the layout needs more GPUs than there are, where memory is too small for what is
    planned on a shared GPU, and where the cache that is asked for is below one sequence.
    """
    num_gpus, num_ranks = len(machine.gpus), specs.roles["trainer"]
    if num_ranks > num_gpus:
        raise ConfigError(
            f"the layout has {num_ranks} processes and the machine {num_gpus} GPUs: those of one engine "
            f"cannot share; use fewer"
        )
    asked = specs.generator.kv_cache_gib
    if asked is None and num_device_procs(specs.roles) <= num_gpus:
        return specs
    needed = longest_sequence_bytes(_shape(specs), specs.generator) / GIB
    if asked is not None and asked < needed:
        raise ConfigError(
            f"kv_cache_gib={asked:g} is less than one sequence of {specs.generator.max_model_len} tokens "
            f"takes, {needed:.2g} GiB; raise it, or lower context_length"
        )
    if num_device_procs(specs.roles) <= num_gpus:
        return specs
    if asked is None:
        left = cache_left(placed(specs.roles, _memories(specs), machine, shared=True), machine)
        if left < needed:
            raise ConfigError(
                f"trainer and generators share {num_gpus} x {machine.gpus[0].gib:.1f} GiB of GPU memory, "
                f"{_tenths(needed - left)} GiB short of a cache for one sequence on each generator; {_REMEDY}"
            )
        specs = replace(specs, generator=replace(specs.generator, kv_cache_gib=left))
    memories = _memories(specs)
    _check_room(specs, memories, machine, _REMEDY if asked is None else f"lower kv_cache_gib, or {_REMEDY}")
    return with_budgets(replace(specs, share_devices=True), memories, machine)


def _check_room(specs: ActorSpecs, memories: Mapping[str, Memory], machine: Machine, remedy: str) -> None:
    """Raises ConfigError where a GPU has less than is planned for its processes, with the GPU's shortfall.

    memories: of each process of a role.
    """
    for device, sharing in on_devices(placed(specs.roles, memories, machine, shared=True)).items():
        room = machine.gpus[device].gib * USABLE
        planned = sum(process.memory.total for process in sharing) / GIB
        if planned > room:
            processes = ", ".join(f"{process.role} {process.memory.total / GIB:.1f}" for process in sharing)
            raise ConfigError(
                f"GPU {device} has {room:.1f} GiB for processes that need about {planned:.1f} ({processes}), "
                f"{_tenths(planned - room)} GiB short; {remedy}"
            )


def _tenths(gib: float) -> str:
    """Rounded up, so that a shortfall is never 0."""
    return f"{math.ceil(gib * 10) / 10:.1f}"


def _shape(specs: ActorSpecs) -> ModelShape:
    return ModelShape.of(read_config(specs.trainer.model_dir))


def _memories(specs: ActorSpecs) -> dict[str, Memory]:
    """Of each process, with as many adapters of the largest rank as it may hold."""
    shape, generator = _shape(specs), specs.generator
    all_adapters = LoRA(rank=generator.max_lora_rank * generator.max_adapters)
    adapters = shape.adapter_elements(all_adapters) * _BYTES[generator.dtype]
    parts = generator_memory(shape, generator, on_cpu=False).parts
    return {
        "trainer": engine_memory(shape, specs.trainer.config, all_adapters, learns=True, on_cpu=False),
        "generator": Memory({**parts, "adapters": adapters}),
    }
