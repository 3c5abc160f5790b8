"""Why a run cannot go on from a checkpoint: it is broken, or of another model or algorithm."""

import re
from pathlib import Path
from typing import Any

from rl.controller.checkpoints import critic_path
from rl.controller.config import RunConfig
from rl.errors import RunError
from rl.models.checkpoint_dir import check_files, read_record
from rl.types import POLICY, LoRA

_SHAPE = (
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
)


def checkpoint_state(config: RunConfig, step: int) -> dict[str, Any]:
    """What a checkpoint says of its run, so that another run can tell whether it may go on from it."""
    return {"step": step, "engine": config.trainer.engine, "model": _shape(config)}


def _shape(config: RunConfig) -> dict[str, Any]:
    hf = config.model.config()
    return {key: hf[key] for key in _SHAPE if hf.get(key) is not None}


def check_resume(config: RunConfig) -> list[str]:
    """What is wrong with resume, one line each."""
    given, path = f"resume={config.resume!r}", Path(config.resume)
    example = "give runs/.../checkpoints/step-N"
    match = re.fullmatch(r"step-(\d+)", path.name)
    if match is None:
        return [f"{given} is not named step-N; {example}"]
    try:
        record = read_record(path)
        check_files(path)
        saved = record["state"], record["adapters"]
    except RunError as error:
        return [f"resume: {error}"]
    except (KeyError, TypeError):
        return [f"{given} has a record.json that no checkpoint of a run has; {example}"]
    if config.model.validate():  # listed already
        return []
    found = _another_run(config, path, *saved)
    if int(match[1]) >= config.steps:
        found.append(f"{given} has done all of steps={config.steps}; raise steps")
    return found


def _another_run(config: RunConfig, path: Path, state: dict[str, Any], adapters: dict[str, Any]) -> list[str]:
    given, found = f"resume={str(path)!r}", []
    engine, model = config.trainer.engine, _shape(config)
    if (theirs := state.get("engine", engine)) != engine:
        found.append(f"{given} was saved with trainer.engine={theirs}; set --trainer.engine {theirs}")
    if differing := _differences(state.get("model", model), model):
        found.append(f"{given} is of another model: {differing}; set model as it was")
    saved = LoRA.from_record(adapters[POLICY]) if POLICY in adapters else LoRA()
    if differing := _differences(vars(saved), vars(config.trainer.lora)):
        found.append(f"{given} was saved with another trainer.lora: {differing}; set it as it was")
    kind, weights = state.get("reference", ["none", ""])
    if config.algorithm.needs_reference and kind != config.reference_kind:
        found.append(
            f"{given} was saved with reference: {kind}, but the run has: {config.reference_kind}; "
            f"set kl, loss, reference.model and trainer.lora as they were"
        )
    elif config.algorithm.needs_reference and weights and not Path(weights).is_dir():
        found.append(
            f"{given} notes the reference's weights {weights}, which are gone; give an earlier checkpoint"
        )
    if config.algorithm.needs_critic:
        try:
            read_record(critic_path(path))
        except RunError:
            found.append(
                f"{given} has no critic beside it, in {critic_path(path)}; "
                f"set advantages as it was, or move both"
            )
    return found


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """ "rank 8, here 4; ..." for each key whose values differ."""
    keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    return ", ".join(f"{key} {theirs.get(key)} there and {ours.get(key)} here" for key in keys)
