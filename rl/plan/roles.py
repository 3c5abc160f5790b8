"""The roles: what the passes have to know of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl.models.engine_config import Head

if TYPE_CHECKING:
    from rl.plan.demand import Demand
    from rl.plan.types import Phase

_TOKENS = "max_seq_len and trainer.micro_batch_tokens (rl serve: context_length)"
RoleName = Literal["trainer", "generator", "critic", "reference", "judge", "reward"]


@dataclass(frozen=True)
class Role:
    """kind: of its processes. An engine's ranks are one replica; a worker needs no device and no model.

    size: (replicas, processes of each); None where the demand starts none. setting: of its section, by which
    it gets more processes.
    learns, head: of an engine. One that learns has an optimizer.
    model: which of the run's models it loads (`model_dirs` in config/settle.py): "model" is the policy's.
    lower_by: the settings by which it needs less memory.
    works: the phases in which it is on its device where roles take turns; None: it never leaves.
    beside: who works at the same time, and shares the cores.
    max_restarts: of each replica; of engines, which are started again together, of all of them.
    """

    kind: Literal["engine", "generator", "worker"]
    size: "Callable[[Demand], tuple[int, int] | None]"
    setting: str
    works: "tuple[Phase, ...] | None"
    beside: tuple[RoleName, ...]
    max_restarts: "Callable[[Demand], int]"
    lower_by: str
    learns: bool = False
    head: Head = "tokens"
    model: str = "model"


def _engine(
    name: RoleName,
    works: "tuple[Phase, ...]",
    beside: tuple[RoleName, ...],
    learns: bool,
    head: Head = "tokens",
    model: str = "model",
    lower_by: str = _TOKENS,
) -> Role:
    def size(demand: "Demand") -> tuple[int, int] | None:
        layout = demand.layout(name)
        return None if layout is None else (1, layout.num_procs)

    return Role(
        kind="engine",
        size=size,
        setting="layout",
        works=works,
        beside=beside,
        max_restarts=lambda demand: demand.trainer.max_restarts,
        lower_by=lower_by,
        learns=learns,
        head=head,
        model=model,
    )


def _of_generators(demand: "Demand") -> int:
    return demand.generator.max_restarts if demand.generator else 0


ROLES: Mapping[RoleName, Role] = {
    "trainer": _engine(
        "trainer",
        works=("score", "train", "sync"),  # it writes a version; generators read it when it is their turn
        beside=("trainer", "critic"),  # both learn at the same time
        learns=True,
        lower_by=f"{_TOKENS}, or set --trainer.activation_checkpointing full",
    ),
    "generator": Role(
        "generator",
        lambda d: (d.generator.num_replicas, d.generator.tensor_parallel) if d.generator else None,
        setting="num_replicas",
        works=("generate", "grade"),  # a rollout is graded while others are still generated
        beside=("generator",),
        max_restarts=_of_generators,
        lower_by="generator.kv_cache_gib or generator.num_replicas (rl serve: kv_cache_gib, num_generators)",
    ),
    "critic": _engine(
        "critic", works=("score", "train"), beside=("trainer", "critic"), learns=True, head="value"
    ),
    "reference": _engine(
        "reference",
        works=("score",),
        beside=("trainer", "critic", "reference"),  # its forward pass meets those of both
        learns=False,
        model="reference",
    ),
    "judge": Role(
        "generator",
        lambda d: (d.judge.num_replicas, d.judge.tensor_parallel) if d.judge else None,
        setting="num_replicas",
        works=None,
        beside=("judge",),  # not the generator: with half of the cores for each, steps were slower
        max_restarts=_of_generators,
        lower_by="judge.kv_cache_gib or judge.num_replicas",
        model="judge",
    ),
    "reward": Role(
        "worker",
        lambda d: (d.reward.num_procs, 1) if d.reward else None,
        setting="num_procs",
        works=None,
        beside=("reward",),
        max_restarts=lambda d: d.reward.max_restarts if d.reward else 0,
        lower_by="reward.num_procs",
    ),
}
"""In the order in which devices are dealt out."""

ENGINE_ROLES: tuple[RoleName, ...] = tuple(name for name, role in ROLES.items() if role.kind == "engine")
