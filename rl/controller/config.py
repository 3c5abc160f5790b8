"""RunConfig: all settings of a run, frozen, and one function that finds everything wrong with them."""

import dataclasses
import importlib.util
import os
import re
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from rl.envs.base import Env
from rl.errors import ConfigError
from rl.loss.credit import GroupMean
from rl.loss.policy import Clip
from rl.models.checkpoint_dir import is_complete, read_record
from rl.models.hf import check_supported, max_positions
from rl.models.layout import Layout, row_multiple
from rl.models.sources import ModelSource
from rl.types import POLICY, LoRA

MAX_LORA_RANK = 512
_GIB_PER_PROCESS = 1.0  # what a process with torch and vLLM or torchtitan takes before it loads a model
_PROCESSES_PER_CORE = 4


@dataclass(frozen=True)
class TrainerConfig:
    """The PolicyTrainer: its processes, memory and optimizer."""

    engine: Literal["titan", "hf"] = "titan"
    """titan: torchtitan's Qwen3, Qwen3-MoE and Llama 3, in every layout. hf: any of transformers' models, under FSDP2."""
    layout: Layout = Layout()
    lora: LoRA = LoRA()
    float8: bool = False
    """Linear layers in float8: real on GPUs, emulated on a CPU."""
    compile: bool = False
    """torch.compile each layer; on GPUs, in bfloat16 and without context parallelism."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in backward: none of them, the cheap ones, or all of each layer."""
    max_tokens: int = 8192
    """Most tokens of a packed micro-batch, and so of a sequence."""
    lr: float = 1e-6
    """Learning rate, constant after lr_warmup_steps."""
    lr_warmup_steps: int = 5
    """Steps over which the learning rate rises linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 turns clipping off."""

    @property
    def row_multiple(self) -> int:
        return row_multiple(self.layout, self.float8)


@dataclass(frozen=True)
class GeneratorConfig:
    """The vLLM generators."""

    num_replicas: int = 1
    """Engines, each a process with the whole model."""
    max_num_seqs: int = 256
    """Most sequences an engine runs at a time."""
    kv_cache_gib: float = 0.25
    """Memory of each engine's key-value cache."""
    compile: bool = False
    """Compile and capture graphs: faster tokens after a slow start (40 s on a CPU)."""


@dataclass(frozen=True)
class RewardConfig:
    """The processes that verify."""

    num_procs: int = 1
    """Reward processes; each verifies one rollout at a time."""
    limit_seconds: float = 5.0
    """Time for one call of the reward function; past it the sample is dropped and counted."""


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on the environment's demonstrations before the first RL step, with an optimizer of their own."""

    steps: int = 0
    """Number of supervised steps."""
    batch_size: int = 128
    """Demonstrations of a step."""
    lr: float = 3e-3
    """Learning rate, constant."""


@dataclass(frozen=True)
class WeightSyncConfig:
    """How weights reach the generators."""

    transport: Literal["shared_memory", "torchstore"] = "shared_memory"
    """shared_memory between processes of one host; torchstore goes through storage actors."""


@dataclass(frozen=True)
class LaunchConfig:
    """Processes and deadlines."""

    deadline_seconds: float = 600.0
    """Longest time any endpoint may take, loading a model included."""


@dataclass(frozen=True)
class RunConfig:
    """A run of synchronous GRPO."""

    model: ModelSource
    env: Env
    trainer: TrainerConfig = TrainerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    reward: RewardConfig = RewardConfig()
    loss: Clip = Clip()
    credit: GroupMean = GroupMean()
    warmup: WarmupConfig = WarmupConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    launch: LaunchConfig = LaunchConfig()
    steps: int = 100
    """RL steps."""
    prompts_per_step: int = 32
    """Prompts of a step."""
    group_size: int = 8
    """Rollouts of each prompt, over which advantages are computed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """In which trainer and generator compute. Master weights, gradient reduction and optimizer state are fp32 always."""
    seed: int = 0
    """All randomness follows from it and from the step, the prompt and the sample."""
    eval_every: int = 20
    """Steps between evaluations on the held-out problems; the first and the last step are always evaluated."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves only the last step."""
    keep_checkpoints: int = 0
    """How many of the newest checkpoints to keep; 0 keeps all."""
    resume_from: str = ""
    """A checkpoint directory (runs/.../checkpoints/step-N): go on after its step, with its weights and optimizer."""
    run_dir: str = ""
    """Where everything is written; empty means runs/<recipe>-<time>."""


def problems(config: RunConfig) -> list[str]:
    """Everything that keeps the run from starting, one line each; empty where it can start. Starts no process."""
    found = _out_of_range(config)
    found += config.env.problems() or _env_at_work(config)
    if config.loss.low > 1:
        found.append(f"loss.low={config.loss.low} must be at most 1: ratios are never under 0")
    found += [f"trainer.betas={config.trainer.betas} must lie in [0, 1)"] * any(not 0 <= b < 1 for b in config.trainer.betas)
    model_problems = config.model.problems()
    found += model_problems
    if not model_problems:
        found += _model_against_layout(config)
        if config.env.chat and not config.model.has_chat_template:
            found.append("env.chat=True but the model's tokenizer has no chat template; set --env.chat False")
    found += _engine(config) + _machine(config)
    if config.group_size < 2:
        found.append(f"group_size={config.group_size} gives every advantage 0; use 2 or more")
    if config.resume_from and (step := resume_step(config)) is None:
        found.append(f"resume_from={config.resume_from!r} is not named step-N; give runs/.../checkpoints/step-N")
    elif config.resume_from and not is_complete(config.resume_from):
        found.append(f"resume_from={config.resume_from!r} is not a complete checkpoint; give runs/.../checkpoints/step-N")
    elif config.resume_from and (reason := _other_adapter(config)):
        found.append(reason)
    elif config.resume_from and step >= config.steps:
        found.append(f"resume_from={config.resume_from!r} has done all of steps={config.steps}; raise steps")
    if config.run_dir and os.path.isdir(config.run_dir) and os.listdir(config.run_dir):
        found.append(f"run_dir={config.run_dir!r} exists and is not empty; give another directory")
    return found


def resume_step(config: RunConfig) -> int | None:
    """The step whose checkpoint the run goes on from."""
    match = re.fullmatch(r"step-(\d+)", Path(config.resume_from).name)
    return int(match[1]) if match else None


def _other_adapter(config: RunConfig) -> str:
    """Why the checkpoint is not one of what learns in this run; empty where it is."""
    saved = read_record(Path(config.resume_from))["adapters"].get(POLICY, dataclasses.asdict(LoRA()))
    saved = LoRA(**(saved | {"targets": tuple(saved["targets"])}))
    if saved == config.trainer.lora:
        return ""
    return f"resume_from={config.resume_from!r} was saved with trainer.lora {saved}, not {config.trainer.lora}; set it as it was"


_AT_LEAST_ONE = (
    "steps", "prompts_per_step", "eval_every", "generator.num_replicas", "generator.max_num_seqs", "reward.num_procs",
    "trainer.max_tokens", "env.max_new_tokens", "env.num_eval", "warmup.batch_size",
    "trainer.layout.replicate", "trainer.layout.shard", "trainer.layout.context_parallel", "trainer.layout.tensor_parallel",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "trainer.lr",
    "trainer.eps",
    "trainer.weight_decay",
    "warmup.lr",
    "credit.eps",
    "seed",
    "trainer.lr_warmup_steps",
    "trainer.max_grad_norm",
    "warmup.steps",
    "save_every",
    "keep_checkpoints",
    "trainer.lora.rank",
    "trainer.lora.alpha",
    "loss.low",
    "loss.high",
)
_POSITIVE = ("generator.kv_cache_gib", "reward.limit_seconds", "launch.deadline_seconds")


def _out_of_range(config: RunConfig) -> list[str]:
    bounds = [
        (_AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
        (_AT_LEAST_ZERO, lambda v: v >= 0, "at least 0"),
        (_POSITIVE, lambda v: v > 0, "over 0"),
    ]
    return [
        f"{name}={attrgetter(name)(config)} must be {words}"
        for names, holds, words in bounds
        for name in names
        if not holds(attrgetter(name)(config))
    ]


def _env_at_work(config: RunConfig) -> list[str]:
    """Ask the environment for what the run will ask it for."""
    try:
        held_out = config.env.eval_problems()
        problem = config.env.train_problem(config.seed)
        if config.warmup.steps > 0:
            config.env.demonstration(problem, config.seed)
        text = "".join(p.question + p.answer for p in [problem, *held_out])
        if unknown := config.model.unknown_characters(text):
            return [f"the task uses characters that model.alphabet lacks: {unknown!r}; add them"]
    except ConfigError as error:
        return [str(error)]
    except Exception as error:  # the user's own code: say so, rather than show our stack
        return [f"env {type(config.env).__name__} failed to make a problem ({error!r}); mend it, or its settings"]
    return []


def _model_against_layout(config: RunConfig) -> list[str]:
    hf, tensor_parallel = config.model.config(), config.trainer.layout.tensor_parallel
    found = []
    if config.trainer.engine == "titan":
        try:
            check_supported(hf)
        except ConfigError as error:
            found.append(f"{error}, or set --trainer.engine hf")
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := hf.get(key)) and tensor_parallel > 0 and heads % tensor_parallel:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            found.append(
                f"trainer.layout.tensor_parallel={tensor_parallel} does not divide the model's {key}={heads}; use one of {divisors}"
            )
    limit = min(max_positions(hf), config.trainer.max_tokens)
    if config.env.max_new_tokens >= limit:
        found.append(
            f"env.max_new_tokens={config.env.max_new_tokens} leaves no room for a prompt in {limit} tokens (the model's positions, trainer.max_tokens); use less"
        )
    return found


def _engine(config: RunConfig) -> list[str]:
    """What the chosen engine, or the machine, does not have; and settings that would be without effect."""
    trainer, lora, found = config.trainer, config.trainer.lora, []
    if trainer.engine == "hf":
        found += [f"trainer.{name}=True needs trainer.engine=titan" for name in ("float8", "compile") if getattr(trainer, name)]
        if trainer.layout.procs_per_row > 1:
            found.append("trainer.layout.tensor_parallel and context_parallel need trainer.engine=titan; use trainer.layout.shard")
    if trainer.compile and not torch.cuda.is_available():
        found.append("trainer.compile=True needs a GPU; set it to False")
    elif trainer.compile and (config.dtype != "bfloat16" or trainer.layout.context_parallel > 1):
        found.append("trainer.compile=True needs dtype=bfloat16 and no context parallelism; set it to False")
    if trainer.float8 and importlib.util.find_spec("torchao") is None:
        found.append("trainer.float8=True needs torchao; install it: pip install torchao==0.18.0")
    if lora.rank > MAX_LORA_RANK:
        found.append(f"trainer.lora.rank={lora.rank} is over {MAX_LORA_RANK}, the most that vLLM serves; use less")
    if not lora.rank and lora != LoRA():
        found.append("trainer.lora.alpha and trainer.lora.targets have no effect with trainer.lora.rank=0; set a rank")
    if lora.rank and not lora.alpha:
        found.append("trainer.lora.alpha=0 silences the adapter; use more")
    if lora.rank and not lora.targets:
        found.append("trainer.lora.targets is empty; name the layers that get an adapter")
    if config.keep_checkpoints and not config.save_every:
        found.append(
            f"keep_checkpoints={config.keep_checkpoints} has no effect with save_every=0, which saves the last step alone; set save_every"
        )
    return found


def _machine(config: RunConfig) -> list[str]:
    model_procs = config.trainer.layout.num_procs + config.generator.num_replicas
    if torch.cuda.is_available():
        if model_procs > (gpus := torch.cuda.device_count()):
            return [
                f"{model_procs} processes (trainer.layout {config.trainer.layout.num_procs} + generator.num_replicas "
                f"{config.generator.num_replicas}) need a GPU each but the machine has {gpus}; use fewer"
            ]
        return []
    total = model_procs + config.reward.num_procs
    cores = os.cpu_count() or 1
    free = psutil.virtual_memory().available / 2**30
    most = min(int(free / _GIB_PER_PROCESS), cores * _PROCESSES_PER_CORE)
    if total > most:
        return [f"{total} processes are more than this machine can hold ({cores} cores, {free:.0f} GiB free: at most {most}); use fewer"]
    cache = config.generator.num_replicas * config.generator.kv_cache_gib
    if cache > free:
        return [f"generator.kv_cache_gib={config.generator.kv_cache_gib:g} needs {cache:g} GiB but {free:.0f} are free; use less"]
    return []


def to_json(config: Any) -> Any:
    """Nested dataclasses as plain data, each with its type's name."""
    if dataclasses.is_dataclass(config):
        fields = {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"type": type(config).__name__} | fields
    return list(map(to_json, config)) if isinstance(config, tuple) else config


__all__ = [
    "GeneratorConfig",
    "LaunchConfig",
    "RewardConfig",
    "RunConfig",
    "TrainerConfig",
    "WarmupConfig",
    "WeightSyncConfig",
    "problems",
    "to_json",
]
