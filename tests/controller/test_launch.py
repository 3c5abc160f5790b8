"""What the settings become for the processes."""

import dataclasses

from configs.quickstart import quickstart
from rl.controller.config import TrainerConfig
from rl.controller.launch import engine_config, generator_args
from rl.models.engine_config import EngineConfig
from rl.models.layout import Layout
from rl.types import LoRA


def test_every_setting_of_the_engine_is_reached_from_the_run_config():
    config = dataclasses.replace(
        quickstart(),
        dtype="bfloat16",
        seed=3,
        trainer=TrainerConfig(
            layout=Layout(shard=2, context_parallel=2),
            lora=LoRA(rank=8),
            float8=True,
            compile=True,
            activation_checkpointing="full",
            max_tokens=100,
        ),
    )
    got = engine_config(
        dataclasses.replace(config, launch=dataclasses.replace(config.launch, deadline_seconds=77))
    )
    assert got == EngineConfig(
        Layout(shard=2, context_parallel=2),
        "bfloat16",
        "full",
        100,
        adapters=True,
        float8=True,
        compile=True,
        seed=3,
        timeout_seconds=77,
    )
    untouched = {f.name for f in dataclasses.fields(EngineConfig) if getattr(got, f.name) == f.default}
    assert untouched == {
        "head"
    }  # a new field has to be reached too; the critic's head is the role's, not a setting
    assert generator_args(config, "model")["max_lora_rank"] == 8
