"""Why a run cannot go on from a checkpoint: it is broken, or of another model or algorithm."""

import os
import re
from pathlib import Path
from typing import Any, get_args

from rl.config.resume import is_own
from rl.config.run import RunConfig
from rl.errors import RunError
from rl.models.checkpoint_dir import critic_path, read_record, reference_weights, why_damaged
from rl.types import POLICY, EngineName, LoRA

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


_PROMPTS_FOLLOW_FROM = ("seed", "prompts_per_step")
"""With others, prompts that were trained on would come again, and others never."""


def checkpoint_notes(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint says of its run, so that another run can tell whether it may go on from it."""
    return {
        "engine": config.trainer.engine,
        "model": _shape(config),
        "prompts_follow_from": {name: getattr(config, name) for name in _PROMPTS_FOLLOW_FROM},
    }


def _shape(config: RunConfig) -> dict[str, Any]:
    hf = config.model.config()
    return {key: hf[key] for key in _SHAPE if hf.get(key) is not None}


class _Saved:
    """What a record.json says. Raises one of many errors where a run did not write it."""

    def __init__(self, record: dict[str, Any]):
        state, adapters = dict(record["state"]), dict(record["adapters"])
        self.engine: str | None = state.get("engine")
        if self.engine not in (None, *get_args(EngineName)):
            raise ValueError(self.engine)
        self.model: dict[str, Any] | None = dict(state["model"]) if "model" in state else None
        self.lora = LoRA.from_record(adapters[POLICY]) if POLICY in adapters else LoRA()
        self.reference, self.reference_weights = map(str, state.get("reference", ["none", ""]))
        self.step = int(state["step"])
        self.prompts: dict[str, Any] = dict(state.get("prompts_follow_from", {}))


def check_resume(config: RunConfig, starts_reference: bool = True) -> list[str]:
    """What is wrong with resume, one line each."""
    setting, path = f"resume={config.resume!r}", Path(config.resume)
    example = "give runs/.../checkpoints/step-N"
    match = re.fullmatch(r"step-(\d+)", path.name)
    if match is None:
        missing = "" if os.path.exists(path) else "does not exist, and "
        return [
            f"{setting} {missing}is not named step-N; give a run's directory, or runs/.../checkpoints/step-N"
        ]
    try:
        record = read_record(path)
    except RunError as error:
        return [f"resume: {error}"]
    if damage := why_damaged(path):
        return [f"resume: {damage}; give another checkpoint"]
    try:
        saved = _Saved(record)
    except (KeyError, TypeError, ValueError, AttributeError):
        return [f"{setting} has a record.json that no checkpoint of a run has; {example}"]
    if config.model.validate():  # listed already
        return []
    problems = _another_run(config, path, saved, starts_reference)
    if int(match[1]) != saved.step:
        problems.append(f"{setting} holds step {saved.step}; name it step-{saved.step}")
    if saved.step > config.steps or (
        saved.step == config.steps and not is_own(config.resume, config.run_dir)
    ):
        problems.append(f"{setting} has done all of steps={config.steps}; raise steps")
    return problems


def _another_run(config: RunConfig, path: Path, saved: _Saved, starts_reference: bool) -> list[str]:
    setting, problems = f"resume={str(path)!r}", []
    if saved.engine not in (None, config.trainer.engine):
        problems.append(
            f"{setting} was saved with trainer.engine={saved.engine}; set --trainer.engine {saved.engine}"
        )
    if saved.model is not None and (differing := _differences(saved.model, _shape(config))):
        problems.append(f"{setting} is of another model: {differing}; set model as it was")
    if differing := _differences(vars(saved.lora), vars(config.trainer.lora)):
        problems.append(f"{setting} was saved with another trainer.lora: {differing}; set it as it was")
    for name, value in saved.prompts.items():
        if value != (current := getattr(config, name, None)):
            problems.append(
                f"{setting} was saved with {name}={value}, and the run has {current}: prompts would come "
                f"twice or never; set --{name} {value}"
            )
    kind, weights = saved.reference, reference_weights(path, saved.reference_weights)
    if config.algorithm.needs_reference and kind != config.reference_kind:
        problems.append(
            f"{setting} was saved with reference: {kind}, but the run has: {config.reference_kind}; "
            f"set kl, loss, reference.model and trainer.lora as they were"
        )
    elif starts_reference and config.algorithm.needs_reference and weights and not Path(weights).is_dir():
        problems.append(
            f"{setting} notes the reference's weights {weights}, which are gone; give an earlier checkpoint"
        )
    if config.algorithm.needs_critic:
        try:
            read_record(critic_path(path))
        except RunError:
            problems.append(
                f"{setting} has no critic beside it, in {critic_path(path)}; "
                f"set advantages as it was, or move both"
            )
    return problems


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """As `rank 8 there and 4 here`, for each key whose values differ."""
    keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    return ", ".join(f"{key} {theirs.get(key)} there and {ours.get(key)} here" for key in keys)
