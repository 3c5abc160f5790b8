"""The runs that are simulated: those that this machine can do, and larger ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulation.seconds import Device, Machine
from benchmarks.simulation.world import Workload
from configs.quickstart import quickstart
from configs.smollm2 import smollm2
from rl.config import GeneratorConfig, RewardConfig, RunConfig, TrainerConfig, WarmupConfig
from rl.envs.base import derive_seed
from rl.models.layout import Layout
from rl.models.sources import TinyQwen3
from rl.models.tokenizer import HFTokenizer
from rl.plan.cluster import Cluster, Host, parse_cluster

STEPS = 8
FLAGS = (
    "--steps",
    STEPS,
    "--eval_every",
    10**6,
    "--resampling_rounds",
    0,
    "--env.num_eval",
    4,
    "--weight_sync.delta",
    "off",
)
"""Of the real runs. What a policy has learned decides how much is sampled again, which nobody knows before."""
_LENGTHS = 10_000  # from which an answer's is drawn


@dataclass(frozen=True)
class StandIn(TinyQwen3):
    """The sizes of Qwen3-8B for the Plan, and the tokenizer of a tiny model: weights are never made."""

    def config(self) -> dict:
        return super().config() | {
            "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
        }  # fmt: skip


def without_pauses(config: RunConfig, steps: int = STEPS) -> RunConfig:
    """As it is simulated: no warm-up, no evaluation, no checkpoint."""
    env = replace(config.env, num_eval=1)
    rest = {"eval_every": 10**9, "save_every": 0, "save_every_minutes": 0.0, "resampling_rounds": 0}
    return replace(config, warmup=WarmupConfig(), env=env, steps=steps, **rest)


def workload(config: RunConfig, tokenizer: HFTokenizer, cut: float) -> Workload:
    """Answers are as long as the task's demonstrations, which the policy has learned before; a share of them, `cut`,
    as long as they may be."""
    env = config.env
    problems = [env.train_problem(derive_seed("simulation", i)) for i in range(500)]
    answers = [env.demonstration(problem, i) for i, problem in enumerate(problems)]
    lengths = [min(len(tokenizer.encode_plain(answer)) + 1, env.max_new_tokens) for answer in answers]
    prompts = [len(env.encode(problem, tokenizer).tokens) for problem in problems]
    shared = len(tokenizer.encode(env.prompt_prefix)) if env.prompt_prefix else 0
    lengths *= _LENGTHS // len(lengths)
    lengths[: round(cut * _LENGTHS)] = [env.max_new_tokens] * round(cut * _LENGTHS)
    return Workload(lengths, sum(prompts) // len(prompts), shared)


@dataclass(frozen=True)
class Case:
    """A run that this machine can do. cores: of each host."""

    name: str
    recipe: str
    config: RunConfig
    num_hosts: int
    cores: int

    @property
    def cluster(self) -> Cluster:
        return Cluster((Host(self.cores, 24.0),) * self.num_hosts)


RECIPES = {"quickstart": quickstart, "smollm2": smollm2}


def cases(recipes: Sequence[str] = tuple(RECIPES)) -> list[Case]:
    """Two hosts share the machine's two cores."""
    return [
        Case(
            f"{name}, {count} host{'s' * (count > 1)}",
            name,
            without_pauses(RECIPES[name]()),
            count,
            2 // count,
        )
        for name in recipes
        for count in (1, 2)
    ]


def cpu_hosts(count: int, steps: int, recipe: Callable[[], RunConfig] = smollm2) -> tuple[RunConfig, Cluster]:
    """SmolLM2 on hosts like this one: a trainer's rank on one in four, a generator on each other."""
    trainers = max(1, count // 4)
    generators = max(1, count - trainers)
    base = recipe()
    config = replace(
        base,
        trainer=replace(base.trainer, layout=Layout(replicate=trainers), hosts=tuple(range(trainers))),
        generator=replace(
            base.generator, num_replicas=generators, hosts=tuple(range(trainers, count)) if count > 1 else ()
        ),
        reward=RewardConfig(num_procs=generators, hosts=tuple(range(trainers, count)) if count > 1 else ()),
        prompts_per_step=16 * generators,
        max_offpolicy_steps=1,
        minibatches=1,
    )
    return without_pauses(config, steps), Cluster((Host(2, 24.0),) * count)


def gpu_hosts(count: int, steps: int) -> tuple[RunConfig, Cluster]:
    """Qwen3-8B's sizes on hosts of eight H100: one host in four trains, each other has eight generators."""
    trainers = max(1, count // 4)
    generators = 8 * (count - trainers)
    base = quickstart()
    config = replace(
        base,
        model=StandIn(alphabet=base.model.alphabet, max_length=40960),
        env=replace(base.env, max_new_tokens=4096),
        trainer=TrainerConfig(
            layout=Layout(replicate=trainers, shard=8), micro_batch_tokens=16384,
            activation_checkpointing="full", hosts=tuple(range(trainers)),
        ),
        generator=GeneratorConfig(num_replicas=generators, max_num_seqs=256, hosts=tuple(range(trainers, count))),
        reward=RewardConfig(num_procs=count - trainers, hosts=tuple(range(trainers, count))),
        max_seq_len=8192,
        prompts_per_step=16 * generators,
        group_size=8,
        max_offpolicy_steps=1,
        dtype="bfloat16",
    )  # fmt: skip
    return without_pauses(config, steps), parse_cluster(f"{count} x 8xH100-80", Host(2, 24.0))


H100 = Device({"bfloat16": {1: 4e14}, "float32": {1: 3e13}}, 2e12, 5e-6)
"""Assumed, not measured: 40% of what NVIDIA gives for large multiplications in bf16, 60% of its memory's rate."""


def with_gpus(machine: Machine, link: float) -> Machine:
    """The controller's costs as they are here."""
    no_cpu = replace(
        machine.overheads, train=0.02, optim=0.01, decode=0.004, sequence=1e-5, publish=0.05, load=0.2
    )
    return replace(machine, devices={0: H100}, overheads=no_cpu, link=link)
