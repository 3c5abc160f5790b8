"""What keeps a run from starting: what is wrong with its settings, or what this machine cannot do."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.config.algorithm_rules import check_algorithm, without_effect
from rl.config.checkpoint_rules import check_resume
from rl.config.codec import why_no_run
from rl.config.env_rules import check_chat_env, check_env, check_prompts
from rl.config.judge_rules import check_judge
from rl.config.replay_rules import check_replay
from rl.config.run import RunConfig
from rl.config.settle import NOT_STARTED, Command, demand_of, longest_sequence, why_no_plan
from rl.config.taught_rules import check_taught
from rl.envs.chat.env import ChatEnv
from rl.errors import ConfigError
from rl.fields import check_fields
from rl.models.hf import max_positions
from rl.models.hf_checks import check_dropout, check_rope_is_fixed, check_supported, check_unquantized
from rl.models.layout import Layout
from rl.observability.silence import break_silence
from rl.owned_directory import SHARED_MEMORY
from rl.paths import why_not_made
from rl.plan.cluster import Cluster
from rl.types import LoRA

_OF_A_CHAT = "a ChatEnv needs one: use another model (a TinyQwen3 has one if its alphabet has >[](),=)"


def validate(
    config: RunConfig,
    known: Sequence[str] = (),
    cluster: Cluster | None = None,
    in_place: bool = False,
    command: Command = "train",
) -> list[str]:
    """Everything that keeps the command from starting, one line each; empty if none. Starts no process.

    known: problems that were found before, and come first. cluster: where it would run; None: this host.
    in_place: run_dir may hold the run's own earlier steps.
    """
    try:
        config, wrong = check_fields(config)
    except ConfigError as error:
        return [*known, *str(error).splitlines()]
    problems = [*known, *wrong]
    env_problems = [line for line in problems if line.startswith("env.")]
    if not env_problems:  # with a default in its place it is another task
        with break_silence(f"making problems of {type(config.env).__name__}"):
            env_problems = check_env(config)
        problems += env_problems
    problems += check_settings(config, command)
    model_problems = config.model.validate()
    problems += model_problems
    if not model_problems:
        problems += _models_against_layouts(config, command)
        chats = any(env.chat for env in config.env.made_of)
        if chats and (why := config.model.why_no_chat()):
            without = _OF_A_CHAT if isinstance(config.env, ChatEnv) else "set --env.chat False"
            problems.append(f"env.chat=True but the model's tokenizer {why}; {without}")
        elif isinstance(config.env, ChatEnv) and not env_problems:
            problems += check_chat_env(config.env, config.model.tokenizer())
        problems += [
            f"env.stop has {text!r}, which is not one token of the model's tokenizer; use a text that is"
            for env in config.env.made_of
            for text in config.model.not_one_token(env.stop)
        ]
    problems += why_no_plan(config, command, cluster, not model_problems)
    if config.resume:
        problems += check_resume(config, "reference" not in NOT_STARTED[command])
    if SHARED_MEMORY.is_dir() and not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        problems.append(
            f"{SHARED_MEMORY} may not be written to, through which weights go; mount a tmpfs there"
        )
    problems += _run_dir(config, in_place)
    if command == "train":
        problems += config.tracking.validate()
    if not problems:  # with the model that all of the above holds for
        problems += check_texts(config)
    return problems


def check_settings(config: RunConfig, command: Command) -> list[str]:
    """What is wrong with the settings, whatever the model, the data and the machine are. Reads no file."""
    problems = []
    # What a command does not read cannot be changed by its flags either.
    if command != "eval":
        problems += check_algorithm(config) + without_effect(config)
    if command != "replay":
        problems += check_judge(config)
    problems += check_replay(config)
    if not all(0 <= beta < 1 for beta in config.trainer.betas):
        problems.append(f"trainer.betas={config.trainer.betas} must lie in [0, 1)")
    return problems + _engine(config, command)


def check_texts(config: RunConfig) -> list[str]:
    """Which prompts, and which texts to learn from, the model cannot take."""
    tokenizer, limit = config.model.tokenizer(), longest_sequence(config)
    problems = check_prompts(config.env, tokenizer, limit) if config.data == "rollouts" else []
    return problems + check_taught(config, tokenizer, limit)


def _run_dir(config: RunConfig, in_place: bool) -> list[str]:
    """Why its directory cannot be made, or is no run's to go on with."""
    setting = f"run_dir={config.run_dir!r}" if config.run_dir else "the directory runs/"
    if in_place and os.path.isdir(config.run_dir):
        if not os.access(config.run_dir, os.R_OK | os.W_OK | os.X_OK):
            return [f"{setting} may not be written to; give another directory"]
        return [f"{setting} {why}"] if (why := why_no_run(Path(config.run_dir))) else []
    return [f"{setting} {why}"] if (why := why_not_made(config.run_dir or "runs/new")) else []


def _layouts(config: RunConfig, command: Command) -> dict[str, tuple[Layout, Any]]:
    """Setting -> the layout of each engine that the command starts, and its model."""
    engines = {"trainer": config.trainer.layout, **demand_of(config, command).engines}
    return {f"{role}.layout": (layout, config.model_of(role)) for role, layout in engines.items()}


def _models_against_layouts(config: RunConfig, command: Command) -> list[str]:
    problems = []
    for name, (_, model) in _layouts(config, command).items():
        if model.validate():  # of a teacher, which are listed already
            continue
        hf = model.config()
        try:
            check_unquantized(hf)
        except ConfigError as error:  # of either engine
            problems.append(str(error))
            continue
        if config.trainer.engine == "titan" and name != "critic.layout":
            try:
                check_supported(hf)
            except ConfigError as error:
                problems.append(f"{error}, or set --trainer.engine hf")
        elif config.trainer.engine == "hf":
            try:
                check_rope_is_fixed(hf, min(max_positions(hf), config.max_seq_len))
                if config.trainer.dropout and name == "trainer.layout":
                    check_dropout(hf)
            except ConfigError as error:
                problems.append(str(error))
        limit = min(max_positions(hf), config.max_seq_len)
        if config.env.max_new_tokens >= limit and name != "critic.layout":
            problems.append(
                f"env.max_new_tokens={config.env.max_new_tokens} leaves no room for a prompt in {limit} "
                f"tokens (the model's positions, max_seq_len); use less"
            )
    return problems


def _engine(config: RunConfig, command: Command) -> list[str]:
    """What the chosen engine does not have; and settings that would be without effect."""
    trainer, lora, problems = config.trainer, config.trainer.lora, []
    if trainer.engine == "hf":
        problems += [
            f"trainer.{name}=True needs trainer.engine=titan; set one of them"
            for name in ("float8", "compile")
            if getattr(trainer, name)
        ]
        problems += [
            f"{name}.tensor_parallel and context_parallel need trainer.engine=titan; use {name}.shard"
            for name, (layout, _) in _layouts(config, command).items()
            if layout.procs_per_row > 1
        ]
    elif trainer.dropout:
        problems.append("trainer.dropout=True needs trainer.engine=hf; torchtitan's models have no dropout")
    if not lora.rank and lora != LoRA():
        problems.append(
            "trainer.lora.alpha and trainer.lora.targets have no effect with trainer.lora.rank=0; set a rank"
        )
    if lora.rank and not lora.alpha:
        problems.append("trainer.lora.alpha=0 silences the adapter; use more")
    if lora.rank and not lora.targets:
        problems.append("trainer.lora.targets is empty; name the layers that get an adapter")
    saves_one = not (config.save_every or config.save_every_minutes)
    if config.keep_checkpoints != RunConfig.keep_checkpoints and saves_one:
        problems.append(
            f"keep_checkpoints={config.keep_checkpoints} has no effect with save_every=0 and "
            f"save_every_minutes=0, which save the last step alone; set save_every"
        )
    return problems
