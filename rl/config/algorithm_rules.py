"""What is wrong with the parts of an algorithm: parts that do not go together, settings nothing reads."""

import dataclasses
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from rl.config.run import RunConfig
from rl.fields import conflicts, shown, unread
from rl.models.sources import ModelSource
from rl.models.tokenizer import HFTokenizer

_PARTS = ("loss", "advantages", "correction", "kl", "entropy", "shaping")


def check_algorithm(config: RunConfig) -> list[str]:
    """Parts of the algorithm that do not go together, and values out of range."""
    problems = []
    for part, example, parameters in (
        ("loss", "Clip()", ["logprobs", "inputs"]),
        ("advantages", "GroupMean()", ["groups"]),
    ):
        chosen = getattr(config, part)
        if not callable(chosen) or isinstance(chosen, type):
            problems.append(
                f"{part}={shown(chosen)} cannot be called; give one of rl/loss, as {part}={example}, or a "
                f"function"
            )
        elif why := _does_not_suit(chosen, parameters):
            problems.append(f"{part}={shown(chosen)} {why}")
    if config.minibatches > 0 and config.prompts_per_step % config.minibatches:
        problems.append(
            f"minibatches={config.minibatches} does not divide prompts_per_step={config.prompts_per_step}; "
            f"use a divisor"
        )
    if (wanted := config.algorithm.learns_from) != config.data:
        problems.append(
            f"loss {type(config.loss).__name__} learns from {wanted}, not from data={config.data}; "
            f"change one of them"
        )
    if config.data == "preferences" and config.entropy != RunConfig.entropy:
        problems.append(
            "entropy does not go with data=preferences, whose loss is a mean over pairs and no mean over "
            "tokens; leave it out"
        )
    if config.algorithm.needs_critic and not hasattr(config.advantages, "returns"):
        problems.append(
            "advantages needs a critic but has no method returns(groups), which says what the critic learns; "
            "add it, as in GAE"
        )
    if config.data == "rollouts" and config.algorithm.reads_rewards and config.group_size < 2:
        if config.algorithm.compares_in_groups:
            problems.append(f"group_size={config.group_size} gives every advantage 0; use 2 or more")
        for name, value in (
            ("shaping.length_coef", config.shaping.length_coef),
            ("resampling_rounds", config.resampling_rounds),
        ):
            if value:
                problems.append(
                    f"{name}={value} compares the rollouts of a group, of which group_size=1 leaves one; "
                    f"use 2 or more"
                )
    if config.stream_groups:
        problems += _streaming(config)
    for part in _PARTS:
        problems += conflicts(getattr(config, part), f"{part}.")
    problems += _overlong(config)
    if config.reference.refresh_every and config.reference.model is not None:
        problems.append(
            "reference.refresh_every would replace the teacher of reference.model by the policy; "
            "set one of them"
        )
    if config.algorithm.needs_teacher and config.reference.model is None:
        problems.append(
            f"loss {type(config.loss).__name__} needs a teacher; set reference.model, as "
            "reference=ReferenceConfig(model=ModelDir(path))"
        )
    if config.reference.model is not None:
        problems += config.reference.model.validate() or _tokenizers(config, config.reference.model)
    return problems


def _overlong(config: RunConfig) -> list[str]:
    setting = f"shaping.overlong_tokens={config.shaping.overlong_tokens}"
    if not config.shaping.overlong_tokens:
        return []
    most, of_turn = config.algorithm.max_new_tokens, config.env.max_new_tokens
    if config.shaping.overlong_tokens > most:
        what = (
            f"env.max_new_tokens={of_turn}"
            if most == of_turn
            else f"the {most} tokens that an episode may sample"
        )
        return [f"{setting} is over {what}; use less"]
    shorter = [env for env in config.env.trains if env.max_new_tokens < of_turn]
    return [
        f"{setting} counts from env.max_new_tokens={of_turn}, which a {type(env).__name__} with "
        f"{env.max_new_tokens} never reaches; give every task of the Mixture as many"
        for env in shorter[:1]
    ]


def _does_not_suit(function: Callable, parameters: list[str]) -> str:
    """What keeps a function of the user's from being called with these, in another process."""
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        return f"does not take ({', '.join(parameters)}); give it these parameters"
    except ValueError:  # one that Python cannot look into
        pass
    try:
        cloudpickle.dumps(function)
    except Exception as error:  # whatever it holds
        return f"cannot be sent to other processes ({error}); make there what it holds"
    return ""


def _streaming(config: RunConfig) -> list[str]:
    """Why the groups of a step have to wait for each other."""
    streamed = f"stream_groups={config.stream_groups}"
    problems = []
    if config.prompts_per_step % config.stream_groups:
        problems.append(
            f"{streamed} does not divide prompts_per_step={config.prompts_per_step}; use a divisor"
        )
    if config.algorithm.num_updates > 1:
        problems.append(
            f"{streamed} needs minibatches=1 and epochs=1: more than one update deals the whole step out"
        )
    if config.algorithm.needs_critic or config.algorithm.looks_at_the_batch:
        problems.append(
            f"{streamed} needs advantages that depend on one group alone; use GroupMean or RLOO, or give "
            f"your own the attribute group_by_group = True"
        )
    if config.resampling_rounds:
        problems.append(
            f"{streamed} does not go with resampling_rounds={config.resampling_rounds}, which chooses from "
            f"the whole step; set one of them to 0"
        )
    return problems


def _tokenizers(config: RunConfig, teacher: ModelSource) -> list[str]:
    """A teacher scores the student's tokens: they must mean the same to it."""
    if config.model.validate():
        return []
    with tempfile.TemporaryDirectory() as directory:
        theirs, ours = (
            HFTokenizer(source.materialize(Path(directory) / name)).vocabulary
            for name, source in (("teacher", teacher), ("student", config.model))
        )
    if theirs == ours:
        return []
    return ["reference.model has another tokenizer than the model; use a teacher that reads the same tokens"]


def without_effect(config: RunConfig) -> list[str]:
    """Settings that were changed and that nothing reads."""
    rollouts, reads_rewards = config.data == "rollouts", config.algorithm.reads_rewards
    unread_sections = [
        ("kl", not config.kl.coef, "kl.coef=0; set kl.coef"),
        ("kl", not rollouts, f"data={config.data}"),
        ("warmup", not config.warmup.steps, "warmup.steps=0; set warmup.steps"),
        ("kl", config.kl.into == "reward" and not reads_rewards, "nothing that reads rewards"),
        (
            "reference",
            not config.algorithm.needs_reference,
            "neither kl.coef nor the loss asking for a reference; set kl.coef",
        ),
        ("reference.layout", config.reference_is_adapter, "a reference that is an adapter in the trainer"),
        ("reference.hosts", config.reference_is_adapter, "a reference that is an adapter in the trainer"),
        ("critic", not config.algorithm.needs_critic, "an estimator that asks for no critic; use GAE"),
        (
            "critic.value_clip",
            config.algorithm.needs_critic
            and config.minibatches * config.epochs == 1
            and not config.trainer.dropout,
            "one update a step, before which no value has moved; raise minibatches or epochs, or leave it",
        ),
        ("shaping", not rollouts, f"data={config.data}"),
        ("advantages", not rollouts or not reads_rewards, "nothing that reads rewards"),
        ("group_size", not rollouts, f"data={config.data}"),
        ("resampling_rounds", not rollouts or not reads_rewards, "nothing that reads rewards"),
        ("correction", not rollouts, f"data={config.data}"),
        ("loss_agg", config.data == "preferences", "pairs, of which the loss is a mean"),
        ("max_offpolicy_steps", not rollouts, f"data={config.data}"),
        ("max_logprob_diff", not rollouts, f"data={config.data}"),
        ("stream_groups", not rollouts, f"data={config.data}"),
        (
            "stream_groups",
            config.stream_groups == config.prompts_per_step,
            f"prompts_per_step={config.prompts_per_step}; use a smaller divisor of it",
        ),
        (
            "generator.updates",
            not config.max_offpolicy_steps,
            "max_offpolicy_steps=0, where no sample is under way then",
        ),
    ]
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    problems = []
    for name, ineffective, reason in unread_sections:
        section, _, leaf = name.partition(".")
        default, value = defaults[section], getattr(config, section)
        if leaf:
            default, value = getattr(default, leaf), getattr(value, leaf)
        if ineffective and value != default:
            remedy = "" if ";" in reason else "; leave it out"
            changes = _changes(name, default, value)
            problems += [f"{changed} has no effect with {reason}{remedy}" for changed in changes]
    shaping, trainer = config.shaping, config.trainer
    if trainer.lr_min_ratio and trainer.lr_schedule == "constant":
        problems.append(
            f"trainer.lr_min_ratio={trainer.lr_min_ratio} has no effect with trainer.lr_schedule=constant; "
            f"set a schedule"
        )
    if trainer.lr_decay_ratio != type(trainer).lr_decay_ratio and trainer.lr_schedule != "wsd":
        problems.append(
            f"trainer.lr_decay_ratio={trainer.lr_decay_ratio} has no effect without trainer.lr_schedule=wsd; "
            f"set it"
        )
    if not trainer.decay_all and trainer.lora.rank and not config.algorithm.needs_critic:
        problems.append(
            "trainer.decay_all=False has no effect with trainer.lora.rank: adapters have matrices alone; "
            "leave it out"
        )
    elif not trainer.decay_all and not trainer.weight_decay:
        problems.append("trainer.decay_all=False has no effect with trainer.weight_decay=0; set a decay")
    for part in _PARTS:
        problems += unread(getattr(config, part), f"{part}.")
    if rollouts and not reads_rewards and (shaping.overlong_tokens or shaping.length_coef):
        problems.append(
            "shaping.overlong_tokens and shaping.length_coef have no effect with nothing that reads rewards; "
            "leave them out"
        )
    return problems


def _changes(name: str, default: Any, value: Any) -> list[str]:
    """ "name=value", or one for each field in which two of the same dataclass differ."""
    if not dataclasses.is_dataclass(value) or type(value) is not type(default):
        return [f"{name}={value if isinstance(value, str) else shown(value)}"]
    pairs = ((f.name, getattr(default, f.name), getattr(value, f.name)) for f in dataclasses.fields(value))
    return [text for field, old, new in pairs if old != new for text in _changes(f"{name}.{field}", old, new)]
