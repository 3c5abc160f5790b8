"""ActorSpecs: what a run's processes are started with."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl.envs.base import Env
from rl.models.engine_config import EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.types import LoRA
from rl.waiting import Deadlines


@dataclass(frozen=True)
class EngineSpec:
    """What an engine's processes are started with. `kind`: a key of models.build.ENGINES."""

    kind: str
    model_dir: Path
    config: EngineConfig


@dataclass(frozen=True)
class ActorSpecs:
    """What a run starts."""

    roles: dict[str, int]  # role -> number of processes, in the order in which devices are dealt out
    trainer: EngineSpec
    generator: VLLMConfig
    env: Env | None = None  # what reward workers score by; None: there are none
    threads: dict[str, int] = field(default_factory=dict)  # role -> of each process; others share the cores
    overlap: bool = False  # generators work at the same time as the engines
    share_devices: bool = False  # processes of several roles may have the same GPU
    num_generators: int = 1
    in_flight_updates: bool = True
    judge: VLLMConfig | None = None  # of the run's own; None: there is none
    num_judges: int = 1
    num_reward_procs: int = 1
    reward_limit_seconds: float = 5.0
    lora: LoRA = LoRA()  # with a rank, the adapter POLICY learns in place of the model
    reference_is_adapter: bool = False  # the adapter REFERENCE, beside it
    adapter_seed: int = 0
    critic: EngineSpec | None = None
    reference: EngineSpec | None = None
    transport: Literal["shared_memory", "torchstore"] = "shared_memory"
    max_trainer_restarts: int = 3  # of trainer, critic and reference, all at once
    max_generator_restarts: int = 3  # of each
    max_reward_restarts: int = 3
    deadlines: Deadlines = Deadlines()
