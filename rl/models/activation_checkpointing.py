"""What is recomputed in backward: torchtitan's policies by name."""

from dataclasses import dataclass

import torch

import rl.models.platform  # noqa: F401  sets torchtitan's device first

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC


class SelectiveCheckpointing(SelectiveAC):
    """torchtitan's selective policy, which knows the attention of GPUs but not the CPU's."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


CHECKPOINTING = {"none": lambda: None, "selective": SelectiveCheckpointing.Config, "full": FullAC.Config}
