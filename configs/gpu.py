"""Recipes for GPUs of 80 GB: GRPO on GSM8K. Planned by `rl plan`; one's shape ran on an H200 (docs/gpu.md).

Model and data come from the Hugging Face Hub; --model.path and --env.path take local ones.
"""

from rl.config import GeneratorConfig, RunConfig, TrainerConfig
from rl.envs.question_file import QuestionFile
from rl.models.layout import Layout
from rl.models.sources import ModelDir
from rl.types import LoRA

GSM8K = QuestionFile(
    path="hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet",
    max_new_tokens=1024,
    num_eval=512,
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def qwen3_0_6b() -> RunConfig:
    """Qwen3-0.6B on GSM8K: one GPU, which trainer and generator share. Not yet measured."""
    return RunConfig(
        model=ModelDir("Qwen/Qwen3-0.6B"),
        env=GSM8K,
        trainer=TrainerConfig(lr=2e-6),
        placement="side_by_side",
        prompts_per_step=64,
        group_size=8,
        minibatches=2,
    )


def qwen3_1_7b() -> RunConfig:
    """Qwen3-1.7B on GSM8K: four GPUs, two to train and two to generate. Not yet measured."""
    return RunConfig(
        model=ModelDir("Qwen/Qwen3-1.7B"),
        env=GSM8K,
        trainer=TrainerConfig(lr=1e-6, micro_batch_tokens=16384, layout=Layout(shard=2)),
        max_seq_len=16384,
        generator=GeneratorConfig(num_replicas=2),
        max_offpolicy_steps=1,
        prompts_per_step=128,
        group_size=8,
        minibatches=2,
    )


def llama_3_1_8b_lora() -> RunConfig:
    """Llama-3.1-8B-Instruct with LoRA on GSM8K: four GPUs, two to train. Not yet measured."""
    return RunConfig(
        model=ModelDir("meta-llama/Llama-3.1-8B-Instruct"),
        env=GSM8K,
        trainer=TrainerConfig(
            lr=2e-5,
            layout=Layout(shard=2),
            lora=LoRA(rank=32, alpha=64),
        ),
        generator=GeneratorConfig(num_replicas=2),
        max_offpolicy_steps=1,
        prompts_per_step=128,
        group_size=8,
        minibatches=2,
    )


def qwen3_30b_a3b_lora() -> RunConfig:
    """Qwen3-30B-A3B (MoE) with LoRA on GSM8K: eight GPUs, four to train. Not yet measured."""
    return RunConfig(
        model=ModelDir("Qwen/Qwen3-30B-A3B"),
        env=GSM8K,
        trainer=TrainerConfig(
            lr=2e-5,
            layout=Layout(shard=4),
            lora=LoRA(rank=32, alpha=64, targets=ATTENTION),
            activation_checkpointing="selective",
        ),
        generator=GeneratorConfig(num_replicas=2, tensor_parallel=2),
        max_offpolicy_steps=1,
        prompts_per_step=128,
        group_size=8,
        minibatches=2,
    )
