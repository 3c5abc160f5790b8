"""What is recomputed in backward: torchtitan's policies by name."""

from dataclasses import dataclass

import torch

import rl.models.platform  # noqa: F401  sets torchtitan's device first

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC


class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's selective policy, but for batched products.

    Those of attention that is made of matmuls, as on a CPU, are its weights: they grow with the square of a
    sequence. It is computed again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() - {torch.ops.aten.bmm.default}


CHECKPOINTING = {"none": lambda: None, "selective": SelectiveCheckpointing.Config, "full": FullAC.Config}
