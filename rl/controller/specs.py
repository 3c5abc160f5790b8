"""From a run's settings to what its processes are started with."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from rl.cluster.actor_specs import ActorSpecs, EngineSpec
from rl.controller.config import RunConfig
from rl.models.engine_config import EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.models.hf import max_positions
from rl.models.layout import Layout


def roles(config: RunConfig, without: Collection[str] = ()) -> dict[str, int]:
    """Role -> number of its processes, in the order in which devices are dealt out; "reward" gets none.

    without: roles that are not started.
    """
    counts = {
        "trainer": config.trainer.layout.num_procs,
        "generator": config.generator.num_replicas * config.generator.tensor_parallel,
    }
    if config.algorithm.needs_critic:
        counts["critic"] = config.critic.layout.num_procs
    if config.algorithm.needs_reference and not config.reference_is_adapter:
        counts["reference"] = config.reference.layout.num_procs
    if config.judge.model is not None:
        counts["judge"] = config.judge.num_replicas * config.judge.tensor_parallel
    counts["reward"] = config.reward.num_procs
    return {role: count for role, count in counts.items() if role not in without}


def actor_specs(
    config: RunConfig, model_dir: Path, run_dir: Path, without: Collection[str] = ()
) -> ActorSpecs:
    """The config's settings by device are known (by_device).

    model_dir: what `config.model.materialize` gave. A teacher and a judge are put into run_dir if need be.
    without: roles that are not started.
    """
    kind, started = config.trainer.engine, roles(config, without)
    critic = reference = None
    if "critic" in started:
        critic = EngineSpec(kind, model_dir, critic_config(config))
    if "reference" in started:
        teacher = config.reference.model
        directory = model_dir if teacher is None else teacher.materialize(run_dir / "teacher")
        reference = EngineSpec(kind, directory, reference_config(config))
    return ActorSpecs(
        roles=started,
        trainer=EngineSpec(kind, model_dir, trainer_config(config)),
        generator=generator_config(config, model_dir),
        env=config.env,
        threads={"trainer": config.trainer.num_threads, "generator": config.generator.num_threads},
        share_devices=config.placement == "shared",
        overlap=config.max_offpolicy_steps > 0 or config.stream_groups > 0,
        num_generators=config.generator.num_replicas if "generator" in started else 0,
        in_flight_updates=config.generator.updates == "in_flight",
        judge=judge_config(config, run_dir / "judge") if "judge" in started else None,
        num_judges=config.judge.num_replicas,
        num_reward_procs=started.get("reward", 0),
        reward_limit_seconds=config.reward.limit_seconds,
        lora=config.trainer.lora,
        reference_is_adapter=config.reference_is_adapter,
        adapter_seed=config.seed,
        critic=critic,
        reference=reference,
        transport=config.weight_sync.transport,
        max_trainer_restarts=config.trainer.max_restarts,
        max_generator_restarts=config.generator.max_restarts,
        max_reward_restarts=config.reward.max_restarts,
        deadlines=config.deadlines,
    )


def longest_sequence(config: RunConfig) -> int:
    """Prompt and all that is sampled."""
    return min(max_positions(config.model.config()), config.trainer.max_tokens)


def trainer_config(config: RunConfig, layout: Layout | None = None) -> EngineConfig:
    trainer = config.trainer
    layout = layout or trainer.layout
    assert config.dtype != "auto"  # by_device
    return EngineConfig(
        layout=layout,
        share_prefixes=trainer.share_prefixes,
        dtype=config.dtype,
        activation_checkpointing=trainer.activation_checkpointing,
        max_seq_len=trainer.max_tokens,
        adapters=trainer.lora.rank > 0,
        dropout=trainer.dropout,
        float8=trainer.float8,
        compile=trainer.compile,
        seed=config.seed if config.model.random_weights else None,
        timeout_seconds=config.deadlines.train,
        save_seconds=config.deadlines.checkpoint,
    )


def critic_config(config: RunConfig) -> EngineConfig:
    """All of it learns, also where the policy is an adapter."""
    return replace(trainer_config(config, config.critic.layout), adapters=False, head="value")


def reference_config(config: RunConfig) -> EngineConfig:
    """With `adapters`, of which it gets none, nothing learns: weights are there once, in compute dtype."""
    source = config.reference.model or config.model
    seed = config.seed if source.random_weights else None
    return replace(trainer_config(config, config.reference.layout), adapters=True, seed=seed)


def generator_config(config: RunConfig, model_dir: Path = Path()) -> VLLMConfig:
    generator = config.generator
    assert config.dtype != "auto"  # by_device
    return VLLMConfig(
        model_dir=str(model_dir),
        dtype=config.dtype,
        max_model_len=longest_sequence(config),
        max_num_seqs=generator.max_num_seqs,
        kv_cache_gib=generator.kv_cache_gib or None,
        cuda_graphs=generator.cuda_graphs == "on",
        block_size=generator.block_size,
        compile=generator.compile,
        tensor_parallel=generator.tensor_parallel,
        max_lora_rank=config.trainer.lora.rank,
    )


def judge_config(config: RunConfig, directory: Path | None = None) -> VLLMConfig | None:
    """directory: where the model is put if need be; None where only its shape matters."""
    judge = config.judge
    assert config.dtype != "auto"  # by_device
    if judge.model is None:
        return None
    return VLLMConfig(
        model_dir=str(judge.model.materialize(directory)) if directory else "",
        weights="directory",
        dtype=config.dtype,
        max_model_len=min(max_positions(judge.model.config()), judge.max_tokens),
        kv_cache_gib=judge.kv_cache_gib,
        cuda_graphs=config.generator.cuda_graphs == "on",
        tensor_parallel=judge.tensor_parallel,
        stop_texts=True,  # its verdicts are held to a JSON schema
    )
