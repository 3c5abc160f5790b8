"""Runs for resolve: every recipe on stand-in hosts, with random changes of its settings. And digests of their plans.

`python -m tests.plan.changes` writes golden.json anew.
"""

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rl.config import CriticConfig, JudgeConfig, RewardConfig, RunConfig
from rl.config.recipes import load_recipe, recipe_names
from rl.config.settle import NOT_STARTED, demand_of, facts_of
from rl.errors import ConfigError
from rl.loss.advantages.gae import GAE
from rl.loss.kl import KL
from rl.models.known_shapes import KNOWN, known_config
from rl.models.layout import Layout
from rl.models.sources import ModelDir
from rl.plan.cluster import Cluster, Host
from rl.plan.resolve import resolve
from rl.plan.show import plan_json
from rl.plan.types import Plan
from rl.types import LoRA
from tests.plans import cluster

GOLDEN = Path(__file__).parent / "golden.json"
CHANGES = 6  # of each recipe on each cluster
CLUSTERS = {
    "2 cores, 8 GiB": Cluster((Host(2, 8.0),)),
    "16 cores, 64 GiB": Cluster((Host(16, 64.0),)),
    "64 cores, 1 TiB": Cluster((Host(64, 1000.0),)),
    **{
        text: cluster(text)
        for text in (
            *(
                "1xT4-16",
                "1xL4-24",
                "2xA10-24",
                "1xH100-80",
                "2xA100-80",
                "4xH100-80",
                "8xH100-80",
                "8xH200-141",
            ),
            *("1xRTX5090-32", "2 x 8xH100-80"),
        )
    },
}
SIZES = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B")


def models(directory: Path) -> list[ModelDir]:
    """Directories with a config.json alone."""
    made = []
    for name in SIZES:
        assert name in KNOWN
        path = directory / name.replace("/", "-")
        path.mkdir()
        (path / "config.json").write_text(json.dumps(known_config(name)))
        made.append(ModelDir(str(path)))
    return made


def recipes() -> dict[str, RunConfig]:
    """Those that can be made with what is installed."""
    made = {}
    for name in recipe_names():
        try:
            made[name] = load_recipe(name)[1]
        except ConfigError:  # its environment is another library's
            continue
    return made


def cases(config: RunConfig, hosts: str, sizes: list[ModelDir], count: int, seed: str) -> Iterator[RunConfig]:
    for number in range(count):
        rng = random.Random(f"{seed} {hosts} {number}")
        keeps = not isinstance(config.model, ModelDir) and rng.random() < 0.3
        changed = config if keeps else replace(config, model=rng.choice(sizes))
        if changed.judge.model is not None:
            changed = replace(changed, judge=replace(changed.judge, model=sizes[0]))
        if changed.reference.model is not None:
            changed = replace(changed, reference=replace(changed.reference, model=sizes[1]))
        for _ in range(rng.randrange(6)):
            changed = change(rng, changed, sizes)
        yield changed


def change(rng: random.Random, config: RunConfig, sizes: list[ModelDir]) -> RunConfig:
    """One setting that a Plan follows from, changed."""
    layout = Layout(
        rng.choice([1, 1, 2]), rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 1, 2]), rng.choice([1, 1, 2])
    )
    judge = JudgeConfig(
        rng.choice([None, *sizes[:2]]), rng.choice([1, 2]), 1, rng.choice([512, 4096]), rng.choice([0.1, 1.0])
    )
    trainer: list[dict] = [
        {"layout": layout}, {"lora": LoRA(rank=rng.choice([0, 8, 64]))}, {"micro_batch_tokens": rng.choice([64, 512, 2048, 8192, 32768])},
        {"activation_checkpointing": rng.choice(["none", "selective", "full"])},
        {"float8": rng.random() < 0.5, "compile": rng.random() < 0.5}, {"num_threads": rng.choice([0, 3])},
        {"engine": rng.choice(["titan", "hf"])},
    ]  # fmt: skip
    generator: list[dict] = [
        {"num_replicas": rng.choice([1, 2, 3])}, {"tensor_parallel": rng.choice([1, 2])},
        {"kv_cache_gib": rng.choice([0.0, 0.0, 0.1, 4.0, 40.0])}, {"num_threads": rng.choice([0, 5])},
        {"block_size": rng.choice([16, 32, 64])}, {"cuda_graphs": rng.choice(["auto", "on", "off"])},
        {"max_num_seqs": rng.choice([16, 1024])}, {"updates": rng.choice(["drain", "in_flight"]), "max_restarts": rng.choice([0, 9])},
    ]  # fmt: skip
    run: list[dict] = [
        {"dtype": rng.choice(["auto", "float32", "bfloat16"])}, {"max_offpolicy_steps": rng.choice([0, 2])},
        {"placement": rng.choice(["auto", "alone", "side_by_side", "by_turns"])}, {"stream_groups": rng.choice([0, 2])},
        {"kl": KL(coef=rng.choice([0.0, 0.1]))}, {"advantages": GAE()}, {"judge": judge}, {"seed": 5},
        {"reward": RewardConfig(num_procs=rng.choice([1, 3]))}, {"model": rng.choice(sizes)}, {"model": rng.choice(sizes)},
        {"reference": replace(config.reference, layout=layout)}, {"critic": CriticConfig(layout=layout)},
    ]  # fmt: skip
    run += [{"trainer": replace(config.trainer, **settings)} for settings in trainer]
    run += [{"generator": replace(config.generator, **settings)} for settings in generator]
    changed = replace(config, **rng.choice(run))
    if changed.trainer.micro_batch_tokens != config.trainer.micro_batch_tokens and rng.random() < 0.5:
        changed = replace(changed, max_seq_len=changed.trainer.micro_batch_tokens)
    return changed


def result(config: RunConfig, command: str, hosts: Cluster) -> Plan | tuple:
    demand = demand_of(config, command)
    facts = replace(facts_of(config, demand), packages=frozenset({"torchao"}))
    return resolve(demand, facts, hosts)


def digest(name: str, config: RunConfig, sizes: list[ModelDir]) -> str:
    """Of what a recipe comes to, with each change, on each cluster, for each command."""
    text = hashlib.sha256()
    for hosts, there in CLUSTERS.items():
        for number, changed in enumerate(cases(config, hosts, sizes, CHANGES, name)):
            made = result(changed, [*NOT_STARTED][number % 3], there)
            data = plan_json(made) if isinstance(made, Plan) else sorted(problem.text for problem in made)
            text.update(json.dumps(data, sort_keys=True).encode())
    return text.hexdigest()[:16]


def digests() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory:
        sizes = models(Path(directory))
        return {name: digest(name, config, sizes) for name, config in recipes().items()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(digests(), indent=1) + "\n")
