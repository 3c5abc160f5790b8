"""Settings whose default depends on the device: one table for the code, `rl doctor` and the docs."""

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rl.cluster.machine import Machine
from rl.controller.config import RunConfig
from rl.controller.memory_plan import cache_left, shares_devices


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


def by_device(config: RunConfig, machine: Machine) -> RunConfig:
    """The config with the device's own value wherever a setting asks for it."""
    shared = shares_devices(config, machine)
    for default in DEVICE_DEFAULTS:
        if attrgetter(default.setting)(config) == default.unset:
            config = _replace(config, default.setting, default.gpu if machine.gpus else default.cpu)
    if shared:
        config = dataclasses.replace(config, placement="shared")
        if not config.generator.kv_cache_gib:
            config = _replace(config, "generator.kv_cache_gib", cache_left(config, machine))
    return config


def _replace(config: Any, setting: str, value: Any) -> Any:
    section, _, rest = setting.partition(".")
    if rest:
        value = _replace(getattr(config, section), rest, value)
    return dataclasses.replace(config, **{section: value})
