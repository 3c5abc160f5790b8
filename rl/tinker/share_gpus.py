"""A server on fewer GPUs than it has processes: who shares which, and how much memory each may take."""

from dataclasses import replace

from rl.cluster.actor_specs import ActorSpecs
from rl.cluster.machine import Machine
from rl.controller.memory_plan import cache_left, num_device_procs, placed, with_budgets
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

_BYTES = {"float32": 4, "bfloat16": 2}


def share_gpus(specs: ActorSpecs, machine: Machine) -> ActorSpecs:
    """The specs as they are where each process has a GPU of its own.

    Raises ConfigError where the layout needs more GPUs than there are, and where memory is too small.
    """
    num_gpus, num_ranks = len(machine.gpus), specs.roles["trainer"]
    if num_ranks > num_gpus:
        raise ConfigError(
            f"the layout has {num_ranks} processes and the machine {num_gpus} GPUs: those of one engine "
            f"cannot share; use fewer"
        )
    if num_device_procs(specs.roles) <= num_gpus:
        return specs
    memories = _memories(specs)
    if specs.generator.kv_cache_gib is None:
        left = cache_left(placed(specs.roles, memories, machine, shared=True), machine)
        needed = longest_sequence_bytes(_shape(specs), specs.generator) / GIB
        if left < needed:
            raise ConfigError(
                f"{num_gpus} GPUs of {machine.gpus[0].gib:.1f} GiB, shared by trainer and generators, have "
                f"{max(0.0, left):.1f} GiB left for a cache, and one sequence needs {needed:.1f}; use a "
                f"smaller model, context_length, limits.max_rank or limits.max_models, or more GPUs"
            )
        specs = replace(specs, generator=replace(specs.generator, kv_cache_gib=left))
        memories = _memories(specs)
    return with_budgets(replace(specs, share_devices=True), memories, machine)


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
