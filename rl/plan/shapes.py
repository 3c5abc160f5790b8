"""Pass: what a model's shape does not go with."""

from collections.abc import Mapping

from rl.models.generator.vllm_config import LORA_RANKS
from rl.models.layout import why_no_split, why_no_vocabulary
from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, Facts
from rl.plan.model_shape import OF_ATTENTION
from rl.plan.numerics import Numerics
from rl.plan.roles import ENGINE_ROLES
from rl.plan.specs import longest_sequence
from rl.plan.types import Notes


def check_shapes(demand: Demand, facts: Facts, numerics: Numerics, cluster: Cluster, notes: Notes) -> None:
    _check_length(demand, facts, notes)
    _check_heads(demand, facts, notes)
    _check_vocabulary(demand, facts, notes)
    _check_adapter(demand, facts, notes)
    shape = facts.models["trainer"].shape
    trainer = demand.trainer
    if shape is not None and shape.num_moe_layers and trainer.lora.rank and not cluster.gpus:
        # vLLM 0.32 samples with an adapter beside experts by kernels of Triton's, which has no CPU.
        notes.problem(
            f"trainer.lora.rank={trainer.lora.rank} of a model with experts needs a GPU, because vLLM's "
            f"kernels do; set it to 0",
        )
    if trainer.engine == "titan":
        width = facts.models["trainer"].expert_width
        if why := why_no_split(width, numerics.dtype, trainer.layout.tensor_parallel):
            notes.problem(why)
    multiple, device = (16, "GPU") if cluster.gpus else (32, "CPU")
    if demand.generator is not None and demand.generator.block_size % multiple:
        notes.problem(
            f"generator.block_size={demand.generator.block_size} is not a multiple of {multiple}, as on a "
            f"{device} it has to be",
        )


def _check_length(demand: Demand, facts: Facts, notes: Notes) -> None:
    tokens, longest = demand.trainer.micro_batch_tokens, longest_sequence(demand, facts)
    if tokens < longest and demand.learns:  # else nothing is packed
        notes.problem(
            f"{demand.name('trainer.micro_batch_tokens')}={tokens} holds no sequence of {longest} tokens; "
            f"raise it, or lower {demand.name('max_seq_len')}",
        )
    if "reference" in demand.engines and (positions := facts.models["reference"].positions) < longest:
        notes.problem(
            f"the reference's model has {positions} positions, and sequences may have {longest} tokens; set "
            f"--max_seq_len {positions}, or give another --reference.model.path",
        )


def _check_vocabulary(demand: Demand, facts: Facts, notes: Notes) -> None:
    for role in ENGINE_ROLES:
        layout, shape = demand.layout(role), facts.models[role].shape if role in facts.models else None
        if layout is not None and shape is not None and (why := why_no_vocabulary(shape.vocab_size, layout)):
            notes.problem(f"{demand.name(f'{role}.layout')}.{why}")


def _check_heads(demand: Demand, facts: Facts, notes: Notes) -> None:
    for role in ENGINE_ROLES:
        layout = demand.layout(role)
        if layout is None:
            continue
        for key, heads in facts.models[role].heads.items():
            if heads % layout.tensor_parallel:
                divisors = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
                notes.problem(
                    f"{demand.name(f'{role}.layout')}.tensor_parallel={layout.tensor_parallel} does not "
                    f"divide the model's {key}={heads}; use one of {divisors}",
                )
    if demand.generator is not None:
        why = why_not_sampled_by(demand.generator.tensor_parallel, facts.models["trainer"].heads)
        if why:
            notes.problem(f"generator.tensor_parallel={demand.generator.tensor_parallel} {why}")


def why_not_sampled_by(split: int, heads: Mapping[str, int]) -> str:
    """Why vLLM cannot split the heads over so many ranks; empty if it can.

    Each rank has as many query heads. It has a share of the key heads too, or one, which others have as well.
    """
    queries = heads.get("num_attention_heads", 0)
    keys = heads.get("num_key_value_heads", queries)
    if queries % split:
        return f"does not divide the model's num_attention_heads={queries}; use a divisor"
    if keys % split and split % keys:
        return (
            f"neither divides the model's num_key_value_heads={keys} nor is a multiple of it; use a divisor"
        )
    return ""


def _check_adapter(demand: Demand, facts: Facts, notes: Notes) -> None:
    lora, layers, shape = demand.trainer.lora, facts.models["trainer"].layers, facts.models["trainer"].shape
    if demand.max_rank > LORA_RANKS[-1]:
        notes.problem(
            f"{demand.name('trainer.lora.rank')}={demand.max_rank} is over {LORA_RANKS[-1]}, the most that "
            f"vLLM serves; use less",
        )
    if not lora.rank:
        return
    if not layers and shape is not None and shape.num_moe_layers == shape.num_layers:
        layers = frozenset(OF_ATTENTION)  # experts have no adapters
    if layers and (unknown := sorted(set(lora.targets) - layers)):
        notes.problem(
            f"trainer.lora.targets names {', '.join(unknown)}, which the model does not have; its layers: "
            f"{', '.join(sorted(layers))}",
        )
