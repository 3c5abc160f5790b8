"""Pass: what a model's shape does not go with."""

from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, Facts
from rl.plan.numerics import Numerics
from rl.plan.types import Notes


def check_shapes(demand: Demand, facts: Facts, numerics: Numerics, cluster: Cluster, notes: Notes) -> None:
    shape = facts.models["trainer"].shape
    trainer, ranks = demand.trainer, demand.trainer.layout.tensor_parallel
    if shape is not None and shape.num_moe_layers and trainer.lora.rank and not cluster.gpus:
        # vLLM 0.32 samples with an adapter beside experts by kernels of Triton's, which has no CPU.
        notes.problem(
            "shapes",
            f"trainer.lora.rank={trainer.lora.rank} of a model with experts needs a GPU, because vLLM's "
            f"kernels do; set it to 0",
        )
    width = facts.models["trainer"].expert_width
    if trainer.engine == "titan" and numerics.dtype != "float32" and width % (8 * ranks):
        # torch's grouped product needs rows of whole 16 bytes.
        part, also = f" over tensor_parallel={ranks}", ", or tensor_parallel lower"
        notes.problem(
            "shapes",
            f"config.json has moe_intermediate_size={width}, which{part if ranks > 1 else ''} is no multiple "
            f"of 8, as {numerics.dtype} needs; set dtype to float32{also if ranks > 1 else ''}",
        )
    if demand.generator is not None and not cluster.gpus and demand.generator.block_size % 32:
        notes.problem(
            "shapes",
            f"generator.block_size={demand.generator.block_size} is not a multiple of 32, as on a CPU "
            f"it has to be",
        )
