"""The roles: what the passes have to know of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rl.models.layout import Layout
from rl.plan.demand import Demand, RoleName
from rl.plan.types import Phase


@dataclass(frozen=True)
class Role:
    """kind: of its processes. An engine's ranks are one replica; a worker needs no device and no model.

    size: (replicas, processes of each); None where the demand starts none. layout: of an engine.
    setting: of its section, by which it gets more processes.
    works: the phases in which it is on its device where roles take turns; None: it never leaves.
    beside: who works at the same time, and shares the cores.
    max_restarts: of each replica; of engines, which are started again together, of all of them.
    """

    kind: Literal["engine", "generator", "worker"]
    size: Callable[[Demand], tuple[int, int] | None]
    setting: str
    works: tuple[Phase, ...] | None
    beside: tuple[RoleName, ...]
    max_restarts: Callable[[Demand], int]
    learns: bool = False
    layout: Callable[[Demand], Layout | None] = lambda demand: None


def _engine(
    layout: Callable[[Demand], Layout | None],
    works: tuple[Phase, ...],
    beside: tuple[RoleName, ...],
    learns: bool,
) -> Role:
    def size(demand: Demand) -> tuple[int, int] | None:
        of_demand = layout(demand)
        return None if of_demand is None else (1, of_demand.num_procs)

    return Role("engine", size, "layout", works, beside, lambda d: d.trainer.max_restarts, learns, layout)


def _of_generators(demand: Demand) -> int:
    return demand.generator.max_restarts if demand.generator else 0


ROLES: Mapping[RoleName, Role] = {
    "trainer": _engine(
        lambda d: d.trainer.layout,
        works=("score", "train", "sync"),  # it writes a version; generators read it when it is their turn
        beside=("trainer", "critic"),  # both learn at the same time
        learns=True,
    ),
    "generator": Role(
        "generator",
        lambda d: (d.generator.num_replicas, d.generator.tensor_parallel) if d.generator else None,
        setting="num_replicas",
        works=("generate", "grade"),  # a rollout is graded while others are still generated
        beside=("generator",),
        max_restarts=_of_generators,
    ),
    "critic": _engine(
        lambda d: d.critic, works=("score", "train"), beside=("trainer", "critic"), learns=True
    ),
    "reference": _engine(
        lambda d: d.reference,
        works=("score",),
        beside=("trainer", "critic", "reference"),  # its forward pass meets those of both
        learns=False,
    ),
    "judge": Role(
        "generator",
        lambda d: (d.judge.num_replicas, d.judge.tensor_parallel) if d.judge else None,
        setting="num_replicas",
        works=None,
        beside=("judge",),  # not the generator: with half of the cores for each, steps were slower
        max_restarts=_of_generators,
    ),
    "reward": Role(
        "worker",
        lambda d: (d.reward.num_procs, 1) if d.reward else None,
        setting="num_procs",
        works=None,
        beside=("reward",),
        max_restarts=lambda d: d.reward.max_restarts if d.reward else 0,
    ),
}
"""In the order in which devices are dealt out."""

ENGINE_ROLES: tuple[RoleName, ...] = tuple(name for name, role in ROLES.items() if role.kind == "engine")
