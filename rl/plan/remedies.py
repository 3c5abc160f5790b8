"""What would make a run fit: changes of what is asked for, from the mildest on."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from rl.models.layout import Layout
from rl.plan.cluster import Cluster
from rl.plan.demand import Demand
from rl.plan.model_shape import OF_ATTENTION

_SELECTIVE = "--trainer.activation_checkpointing selective"
_FULL = "--trainer.activation_checkpointing full"
_LEAST_CACHE_GIB = 0.1


def changes(demand: Demand, cluster: Cluster, has_experts: bool = False) -> Iterator[tuple[str, Demand]]:
    """What to say, and the demand with it. has_experts: then the model's feed-forward has no adapters."""

    def trainer(**settings: object) -> Demand:
        return replace(demand, trainer=replace(demand.trainer, **settings))  # type: ignore[arg-type]

    if demand.command == "serve":  # its settings are told by `last_remedy`
        return
    num_gpus = len(cluster.gpus)
    for gib in _smaller(demand.generator.kv_cache_gib if demand.generator else 0.0):
        assert demand.generator is not None
        generator = replace(demand.generator, kv_cache_gib=gib)
        yield f"set --generator.kv_cache_gib {gib:g}", replace(demand, generator=generator)
    stay = demand.sharing == "side_by_side" or (demand.sharing == "auto" and not cluster.gpus)
    if demand.may_take_turns and stay:
        yield "set --placement by_turns", replace(demand, sharing="by_turns")
    if demand.learns:
        yield from _less_computed(demand, trainer)
    shard = demand.trainer.layout.shard * 2
    while shard <= num_gpus:
        layout = replace(demand.trainer.layout, shard=shard)
        yield f"set --trainer.layout.shard {shard}", trainer(layout=layout)
        if demand.learns:
            yield (
                f"set --trainer.layout.shard {shard} and {_FULL}",
                trainer(layout=layout, activation_checkpointing="full"),
            )
        shard *= 2
    ranks = demand.generator.tensor_parallel * 2 if demand.generator else num_gpus + 1
    while ranks <= num_gpus:
        assert demand.generator is not None
        generator = replace(demand.generator, tensor_parallel=ranks)
        yield f"set --generator.tensor_parallel {ranks}", replace(demand, generator=generator)
        ranks *= 2
    learns_anew = demand.learns and not demand.from_checkpoint
    if learns_anew and not demand.trainer.lora.rank and not _is_split(demand):
        lora, words = replace(demand.trainer.lora, rank=16), "--trainer.lora.rank 16"
        if has_experts:
            lora = replace(lora, targets=OF_ATTENTION)
            words += f", --trainer.lora.targets {' '.join(OF_ATTENTION)}"
        yield f"set {words}", _with_adapter(trainer(lora=lora))
        both = trainer(lora=lora, activation_checkpointing="full")
        yield f"set {words} and {_FULL}", _with_adapter(both)


def _less_computed(demand: Demand, trainer: Callable[..., Demand]) -> Iterator[tuple[str, Demand]]:
    """More that is computed again, fewer tokens at a time, shorter sequences."""
    if demand.trainer.activation_checkpointing == "none":
        yield f"set {_SELECTIVE}", trainer(activation_checkpointing="selective")
    if demand.trainer.activation_checkpointing != "full":
        yield f"set {_FULL}", trainer(activation_checkpointing="full")
    tokens = demand.trainer.micro_batch_tokens // 2
    while tokens >= max(1, min(demand.max_seq_len, demand.longest_answer * 2)):
        fewer = trainer(micro_batch_tokens=tokens, activation_checkpointing="full")
        yield f"set --trainer.micro_batch_tokens {tokens} and {_FULL}", fewer
        if tokens < demand.max_seq_len:
            yield (
                f"set --max_seq_len {tokens}, --trainer.micro_batch_tokens {tokens} and {_FULL}",
                replace(fewer, max_seq_len=tokens),
            )
        tokens //= 2


def _is_split(demand: Demand) -> bool:
    """Whether the reference has a place that it would not have as an adapter in the trainer."""
    layout = demand.engines.get("reference")
    own = layout is not None and not demand.teacher
    return own and (layout != Layout() or "reference" in demand.hosts)


def _with_adapter(demand: Demand) -> Demand:
    """What the policy was is then a second adapter."""
    if "reference" not in demand.engines or demand.teacher:
        return demand
    others = {**demand.engines}
    del others["reference"]
    return replace(demand, engines=others, reference_is_adapter=True)


def _smaller(gib: float) -> Iterator[float]:
    """Halves of a cache that is asked for, in two digits."""
    while gib >= _LEAST_CACHE_GIB:
        gib /= 2
        digits = 1 - math.floor(math.log10(gib))
        yield math.floor(gib * 10**digits) / 10**digits


def last_remedy(demand: Demand, cluster: Cluster) -> str:
    """Where none of these is enough."""
    more = "GPUs" if cluster.gpus else "memory"
    if demand.command != "serve":
        return f"use a smaller model, {'more GPUs, or hosts with ' if cluster.gpus else 'or '}more memory"
    asked = demand.generator is not None and demand.generator.kv_cache_gib
    lower = "lower kv_cache_gib, or " if asked else ""
    return f"{lower}use a smaller model, context_length, limits.max_rank or limits.max_models, or more {more}"
