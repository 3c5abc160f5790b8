"""What a command asks for, and what is known of its models. With the cluster, a Plan follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.errors import ConfigError
from rl.models.experts import expert_width
from rl.models.layout import Layout
from rl.plan.model_shape import ModelShape
from rl.plan.roles import RoleName
from rl.plan.sections import GeneratorConfig, Hosts, RewardConfig, TrainerConfig
from rl.types import LoRA, TransportName
from rl.waiting import Deadlines

_HEADS = ("num_attention_heads", "num_key_value_heads")
DType = Literal["auto", "float32", "bfloat16", "fastest"]
"""auto: bfloat16 on GPUs, float32 on CPUs. fastest: bfloat16 where the devices have instructions for it, else
float32."""
Sharing = Literal["auto", "alone", "side_by_side", "by_turns"]
"""Of GPUs. alone: each process has its own. side_by_side: they are dealt out in turn, and all processes stay.
by_turns: who does not work in a phase leaves its GPU. auto: alone, side by side where there are too few, by
turns where they are full."""


@dataclass(frozen=True)
class JudgeDemand:
    """The engines of a judge. max_tokens: of a question with its verdict, where the model allows so many."""

    num_replicas: int
    tensor_parallel: int
    max_tokens: int
    kv_cache_gib: float


@dataclass(frozen=True)
class Demand:
    """Who is started, and the settings that say how. A role of None, or not among `engines`, is not."""

    command: str
    trainer: TrainerConfig
    generator: GeneratorConfig | None = None
    engines: Mapping[RoleName, Layout] = field(default_factory=dict)
    """Beside the trainer, with the layout of each."""
    judge: JudgeDemand | None = None
    reward: RewardConfig | None = None
    max_seq_len: int = 8192
    """Tokens of a sequence; fewer where the model has fewer positions."""
    dtype: DType = "auto"
    sharing: Sharing = "auto"
    hosts: Mapping[RoleName, Hosts] = field(default_factory=dict)
    """Role -> numbers of the hosts that its processes are spread over, where some are asked for."""
    overlap: bool = False
    """Generators work at the same time as engines."""
    switches: bool = False
    """The command's loop can have roles leave their devices to each other."""
    learns: bool = True
    """Engines compute. Else the trainer loads weights and publishes them."""
    saves: bool = False
    """Engines that learn save checkpoints."""
    saves_beside: bool = False
    """A checkpoint is still written as the next step begins: nothing is sampled in between."""
    from_checkpoint: bool = False
    """Engines load a checkpoint, with the optimizer's moments."""
    transport: TransportName = "shared_memory"
    delta: Literal["auto", "on", "off"] = "auto"
    deadlines: Deadlines = Deadlines()
    longest_answer: int = 0
    """Tokens. No remedy makes sequences shorter than twice as many."""
    reference_is_adapter: bool = False
    """The reference lives in the trainer, beside the adapter that is the policy."""
    teacher: bool = False
    """The reference is another model than the policy was."""
    seed: int = 0
    """Of an adapter's first weights."""
    drawn: tuple[RoleName, ...] = ()
    """Engines whose models have random weights, which the seed draws."""
    clients_adapters: LoRA | None = None
    """Of a server: what clients may make, with the largest rank. None: trainer.lora says what is learned."""
    max_adapters: int = 1
    """How many adapters a generator, and the trainer, may hold at a time."""
    stop_texts: bool = False
    """Generators end at texts, and answer by JSON schemas."""
    scaled_logprobs: bool = False
    """Logprobs of samples are those of what they were drawn from, as Tinker has them; a trainer's are at
    temperature 1."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the command calls a setting, where that is not its name in a run's config."""

    def name(self, setting: str) -> str:
        return self.names.get(setting, setting)

    def layout(self, role: RoleName) -> Layout | None:
        """Of an engine; None where it is not started."""
        return self.trainer.layout if role == "trainer" else self.engines.get(role)

    @property
    def may_take_turns(self) -> bool:
        """Whether roles may leave their devices to each other: in some phases some do not work."""
        return self.switches and not self.overlap

    @property
    def learned_adapters(self) -> LoRA:
        """All that the trainer may learn at a time, as one."""
        lora = self.clients_adapters
        return self.trainer.lora if lora is None else LoRA(rank=lora.rank * self.max_adapters)

    @property
    def max_rank(self) -> int:
        """Of an adapter that generators sample with; 0: they sample with none."""
        return (self.clients_adapters or self.trainer.lora).rank


@dataclass(frozen=True)
class ModelFacts:
    """What a model's config.json says.

    shape: None where it gives no sizes of a decoder. expert_width: of each expert; 0 where there is none.
    heads: of queries and keys, by their names in it. layers: that may have an adapter; empty: not known.
    """

    shape: ModelShape | None
    positions: int
    expert_width: int = 0
    heads: Mapping[str, int] = field(default_factory=dict)
    layers: frozenset[str] = frozenset()

    @staticmethod
    def of(
        hf: Mapping[str, Any], positions: int, layers: frozenset[str] = frozenset(), num_elements: int = 0
    ) -> "ModelFacts":
        """hf: the contents of config.json. num_elements: of the files' tensors; 0: they are not here.

        Where those are more than such a decoder has, it is another, of which no sizes are known.
        """
        try:
            shape = ModelShape.of(hf)
        except ConfigError:
            shape = None
        if shape is not None and num_elements and not shape.may_have(num_elements):
            shape = None
        heads = {name: hf[name] for name in _HEADS if isinstance(hf.get(name), int) and hf[name] > 0}
        return ModelFacts(shape, positions, expert_width(hf), heads, layers)


@dataclass(frozen=True)
class Facts:
    """What was looked up before: by role, of the model that it runs; and which optional packages there are.

    Without models, one could not be read, which is a problem elsewhere: no memory is looked at then.
    """

    models: Mapping[RoleName, ModelFacts] = field(default_factory=dict)
    packages: frozenset[str] = frozenset()
