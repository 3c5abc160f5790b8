"""Settings whose default depends on the device: one table for the code, `rl doctor` and the docs."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from rl.cluster.actor_specs import ActorSpecs
from rl.cluster.machine import Machine
from rl.controller.config import RunConfig
from rl.controller.memory_plan import cache_left, processes, role_memories, shares_devices, with_budgets
from rl.controller.specs import actor_specs


@dataclass(frozen=True)
class DeviceDefault:
    """`unset`: the value of the setting that asks for the device's own."""

    setting: str
    unset: Any
    cpu: Any
    gpu: Any
    why: str


DEVICE_DEFAULTS = (
    DeviceDefault(
        "dtype", "auto", "float32", "bfloat16", "GPUs multiply 16 bits many times faster; what learns is fp32"
    ),
    DeviceDefault(
        "generator.cuda_graphs", "auto", "off", "on", "without graphs the host is slower than the kernels"
    ),
    DeviceDefault(
        "generator.kv_cache_gib",
        0.0,
        0.25,
        0.0,
        "a GPU of its own: what vLLM finds free; a shared one: what the other roles leave",
    ),
    DeviceDefault("generator.num_threads", 0, 0, 1, "on a CPU it computes with its share of the cores (0)"),
    DeviceDefault(
        "placement", "auto", "separate", "separate", "shared where there are fewer GPUs than processes"
    ),
)


def by_device(config: RunConfig, machine: Machine, without: Collection[str] = ()) -> RunConfig:
    """The config with the device's own value wherever a setting asks for it.

    without: roles that are not started.
    """
    shared = shares_devices(config, machine, without)
    for default in DEVICE_DEFAULTS:
        if attrgetter(default.setting)(config) == default.unset:
            config = _replace(config, default.setting, default.gpu if machine.gpus else default.cpu)
    if shared:
        config = dataclasses.replace(config, placement="shared")
        if not config.generator.kv_cache_gib and "generator" not in without:
            left = cache_left(processes(config, machine, without), machine)
            config = _replace(config, "generator.kv_cache_gib", left)
    return config


def specs_on(
    machine: Machine, config: RunConfig, model_dir: Path, run_dir: Path, without: Collection[str] = ()
) -> ActorSpecs:
    """What is started on a machine, with the device's own values and memory budgets.

    model_dir, run_dir: as of `actor_specs`. without: roles that are not started.
    """
    config = by_device(config, machine, without)
    specs = actor_specs(config, model_dir, run_dir, without)
    if not specs.share_devices or not machine.gpus:
        return specs
    return with_budgets(specs, role_memories(config, machine), machine)


def _replace(config: Any, setting: str, value: Any) -> Any:
    section, _, rest = setting.partition(".")
    if rest:
        value = _replace(getattr(config, section), rest, value)
    return dataclasses.replace(config, **{section: value})
