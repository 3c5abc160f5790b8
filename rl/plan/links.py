"""Pass: what goes from role to role."""

from typing import Literal

from rl.plan.demand import Demand, Facts
from rl.plan.memory import BYTES
from rl.plan.numerics import Numerics
from rl.plan.types import Link


def links(demand: Demand, facts: Facts, numerics: Numerics) -> tuple[Link, ...]:
    made: list[Link] = []
    shape, lora = facts.models["trainer"].shape, demand.trainer.lora
    if demand.generator is not None:
        elements = 0 if shape is None else shape.adapter_elements(lora) if lora.rank else shape.num_parameters
        carries: Literal["adapter", "weights"] = "adapter" if lora.rank else "weights"
        num_bytes = elements * BYTES[numerics.dtype]
        made.append(Link("trainer", "generator", carries, demand.transport, num_bytes))
    if demand.judge is not None:
        made.append(Link("reward", "judge", "questions", "http", 0))
    return tuple(made)
