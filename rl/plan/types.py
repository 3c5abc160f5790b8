"""Plan: what runs where, when, how, and with which memory. Settled: nothing in it is left for later."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rl.models.engine_config import EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.plan.cluster import Cluster
from rl.plan.memory import Memory
from rl.plan.roles import RoleName
from rl.types import LoRA, TransportName, UpdateMode
from rl.waiting import Deadlines

Phase = Literal["generate", "grade", "score", "train", "sync"]
PHASES: tuple[Phase, ...] = get_args(Phase)
VERSION = 1
"""Of plan.json."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that an engine starts with. `seed` draws its first weights."""

    name: str
    lora: LoRA
    seed: int


@dataclass(frozen=True)
class EngineSpec:
    """What an engine's processes are started with.

    kind: a key of models.build.ENGINES. model: whose directory it loads: "model" or "reference".
    """

    kind: str
    model: str
    config: EngineConfig
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True)
class GeneratorSpec:
    """What a generator's or judge's processes are started with.

    model: whose directory it reads: "model" or "judge". updates: as the setting generator.updates.
    """

    model: str
    config: VLLMConfig
    updates: UpdateMode = "in_flight"


@dataclass(frozen=True)
class WorkerSpec:
    """What a reward worker is started with. limit_seconds: of one call of the reward function."""

    limit_seconds: float


@dataclass(frozen=True)
class Process:
    """One process. host: its number in the cluster. gpus: their numbers on that host; none on a CPU.

    memory: of each phase, by what it holds, in bytes; empty where the model's sizes are not known.
    """

    host: int
    gpus: tuple[int, ...]
    threads: int
    memory: Mapping[Phase, Memory]

    @property
    def peak(self) -> float:
        """Bytes, in the phase that takes most."""
        return max((memory.total for memory in self.memory.values()), default=0.0)


@dataclass(frozen=True)
class Replica:
    """Processes that are started, and end, as one. max_restarts: of engines, of all of them together."""

    name: str
    role: RoleName
    max_restarts: int
    processes: tuple[Process, ...]
    spec: EngineSpec | GeneratorSpec | WorkerSpec

    @property
    def hosts(self) -> tuple[int, ...]:
        """Each once, in the order of ranks."""
        return tuple(dict.fromkeys(process.host for process in self.processes))


Fallback = Callable[[Collection[int]], tuple[Replica, ...] | str]
"""Lost hosts -> trainer, critic and reference as they are without these; or why they cannot go on."""


@dataclass(frozen=True)
class Link:
    """What goes from one role to another, how, and how many bytes of it at a time."""

    source: RoleName
    target: RoleName
    carries: Literal["weights", "adapter", "questions"]
    transport: Literal[TransportName, "http"]
    bytes: float


@dataclass(frozen=True)
class Stay:
    """Who is on its devices in a phase. All others have left them for the host."""

    phase: Phase
    whole: tuple[str, ...]


@dataclass(frozen=True)
class Settled:
    """A setting, what was asked, what it is, and the fact that decided: for people."""

    setting: str
    asked: str
    value: str
    why: str


@dataclass(frozen=True)
class Problem:
    """Why there is no Plan. is_of_fit: too little memory, for which there may be a remedy."""

    text: str
    is_of_fit: bool = False


@dataclass(frozen=True)
class Plan:
    """See the module."""

    command: str
    cluster: Cluster
    replicas: tuple[Replica, ...]
    links: tuple[Link, ...]
    stays: tuple[Stay, ...]
    max_seq_len: int
    deadlines: Deadlines
    settled: tuple[Settled, ...]
    transport: TransportName
    """Of published weights."""
    delta: bool = False
    """Of weights, what changed since the version before goes from host to host."""
    spare_hosts: tuple[int, ...] = ()
    """Which engines may go to when they lose one."""

    def of(self, role: RoleName) -> tuple[Replica, ...]:
        return tuple(replica for replica in self.replicas if replica.role == role)

    def value_of(self, setting: str) -> str:
        """What it was settled to; empty where it was not among what is settled."""
        return next((one.value for one in self.settled if one.setting == setting), "")

    @property
    def takes_turns(self) -> bool:
        """Whether somebody leaves its device in some phase."""
        return any(len(stay.whole) < len(self.replicas) for stay in self.stays)

    @property
    def hosts(self) -> dict[str, set[int]]:
        """Replica -> the hosts that its processes are on. Empty where all are on one."""
        hosts = {replica.name: {*replica.hosts} for replica in self.replicas}
        return hosts if len(set[int]().union(*hosts.values())) > 1 else {}

    @property
    def roles(self) -> dict[RoleName, int]:
        """Role -> number of its processes, in the order in which devices are dealt out."""
        counts: dict[RoleName, int] = {}
        for replica in self.replicas:
            counts[replica.role] = counts.get(replica.role, 0) + len(replica.processes)
        return counts


class Notes:
    """What the passes write down. They only append."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.settled: list[Settled] = []

    def problem(self, text: str, is_of_fit: bool = False) -> None:
        self.problems.append(Problem(text, is_of_fit))

    def settle(self, setting: str, asked: object, value: object, why: str) -> None:
        self.settled.append(Settled(setting, str(asked), str(value), why))
