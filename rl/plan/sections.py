"""The sections of a run's settings that a Plan follows from: processes, memory, and how they compute."""

from dataclasses import dataclass
from typing import Literal

from rl.bounds import CacheGib, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Share, Threads
from rl.models.layout import Layout
from rl.types import EngineName, LoRA, TransportName, UpdateMode

Hosts = tuple[NonNegativeInt, ...]


@dataclass(frozen=True)
class TrainerConfig:
    """The PolicyTrainer: its processes, memory and optimizer."""

    engine: EngineName = "titan"
    """titan: torchtitan's Qwen3, Qwen3-MoE and Llama 3, in every layout. hf: any of transformers' models,
    under FSDP2."""
    layout: Layout = Layout()
    lora: LoRA = LoRA()
    float8: bool = False
    """Linear layers in float8: real on GPUs, emulated on a CPU."""
    dropout: bool = False
    """The model's own dropout while it learns, with engine=hf. The generator has none, so ratios are not 1
    even on-policy."""
    compile: bool = False
    """torch.compile each layer; on GPUs, in bfloat16 and without context parallelism."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in backward: none of them, the cheap ones, or all of each layer."""
    num_threads: Threads = 0
    """Threads of each process on a CPU; 0 shares the cores with those that work at the same time."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens of a packed micro-batch: memory against speed. At least a sequence, max_seq_len."""
    max_restarts: NonNegativeInt = 3
    """How often trainer, critic and reference are started again from one checkpoint because a process of
    theirs died."""
    share_prefixes: bool = True
    """Compute leading tokens that samples share once. Results are the same but for rounding."""
    lr: NonNegativeFloat = 1e-6
    """Learning rate: the highest of lr_schedule."""
    lr_warmup_steps: NonNegativeInt = 5
    """Steps over which the learning rate rises linearly; where a schedule follows, at most half of all."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warm-up. linear, cosine: down towards lr_min_ratio, which the step after the last would have.
    wsd (warmup-stable-decay): constant, then so over the last lr_decay_ratio of the steps."""
    lr_min_ratio: Share = 0.0
    """The share of the learning rate towards which the schedule goes down."""
    lr_decay_ratio: Share = 0.2
    """With lr_schedule=wsd: the share of the steps, at the end, over which it goes down linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: NonNegativeFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    decay_all: bool = True
    """Norms, biases and embeddings decay too; False spares them."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm; 0 turns clipping off."""
    hosts: Hosts = ()
    """Numbers of the hosts that its ranks are spread over, as many on each: from 0, in --hosts' order. None:
    the Plan chooses."""
    min_hosts: NonNegativeInt = 0
    """With how few hosts trainer, critic and reference go on, with fewer shards, when one has not answered
    for deadlines.start. 0: with all of them: a lost host has to come back."""
    spare_hosts: Hosts = ()
    """Numbers of hosts that then take the place of lost ones first."""


@dataclass(frozen=True)
class GeneratorConfig:
    """The vLLM generators."""

    num_replicas: PositiveInt = 1
    """Engines, each with the whole model."""
    tensor_parallel: PositiveInt = 1
    """Processes of each engine, which split its layers; all on one host."""
    num_threads: Threads = 0
    """Threads of each process on a CPU; 0 shares the cores with those that work at the same time."""
    max_num_seqs: PositiveInt = 256
    """Most sequences an engine runs at a time."""
    kv_cache_gib: CacheGib = 0.0
    """Memory of each process's key-value cache. 0: on a CPU 0.25, or one sequence if that is more; on a GPU
    what is free, or what other roles leave."""
    block_size: PositiveInt = 32
    """Tokens of a block of that cache; samples of a prompt share its whole blocks. On a CPU a
    multiple of 32, on a GPU of 16."""
    compile: bool = False
    """Compile the model: faster tokens after a slow start (40 s on a CPU)."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Decode by CUDA graphs. auto: on a GPU."""
    updates: UpdateMode = "in_flight"
    """New weights while samples are under way. in_flight: these go on with the new weights, which compute
    their tokens so far again. drain: they finish first; faster where answers are short."""
    max_restarts: NonNegativeInt = 3
    """How often a generator, or judge, that dies or no longer answers is started again in a row; the count
    begins anew with one that has served for an hour."""
    hosts: Hosts = ()
    """Numbers of the hosts that its processes are spread over: from 0, in --hosts' order. None: the Plan
    chooses."""


@dataclass(frozen=True)
class RewardConfig:
    """The processes that verify."""

    num_procs: PositiveInt = 1
    """Reward processes. Each verifies one rollout at a time; of a ChatEnv together up to env.max_episodes."""
    limit_seconds: PositiveFloat = 5.0
    """Time for one call of the reward function; past it the sample is scored 0 and counted."""
    max_restarts: NonNegativeInt = 3
    """How often a reward process that dies is started again in a row; the count begins anew with one that
    has served for an hour."""
    hosts: Hosts = ()
    """Numbers of the hosts that its processes are spread over: from 0, in --hosts' order. None: the Plan
    chooses."""


@dataclass(frozen=True)
class WeightSyncConfig:
    """How weights reach the generators."""

    transport: TransportName = "shared_memory"
    """shared_memory: files in each host's shared memory; a host without the trainer fetches a version once.
    torchstore goes through storage actors."""
    delta: Literal["auto", "on", "off"] = "auto"
    """Between hosts goes what changed since the version before, exactly. auto: where the link is slower than
    finding that out, and weights are bfloat16: few of their values change in a step."""
