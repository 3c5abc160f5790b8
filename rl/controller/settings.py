"""The command line's settings: a recipe's config, changed by `--section.field value`."""

import contextlib
import dataclasses
import difflib
import io
import shlex
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import tyro

from rl.controller.config import RENAMED, ReferenceConfig, RunConfig
from rl.errors import ConfigError
from rl.fields import describe_type, expand_paths, postpone_refusals, repeated, short, shown, type_hints
from rl.loss.kl import KL

_TYRO = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)

# What other frameworks (TRL, verl, OpenRLHF, NeMo-RL, prime-rl) call a setting -> what it is called here.
FOREIGN_NAMES = {
    "num_generations": "group_size",
    "rollouts_per_example": "group_size",
    "num_generations_per_prompt": "group_size",
    "n_samples_per_prompt": "group_size",
    "rollout.n": "group_size",
    "learning_rate": "trainer.lr",
    "actor_learning_rate": "trainer.lr",
    "optim.lr": "trainer.lr",
    "max_completion_length": "env.max_new_tokens",
    "max_response_length": "env.max_new_tokens",
    "generate_max_len": "env.max_new_tokens",
    "max_tokens": "env.max_new_tokens",
    "epsilon": "loss.low",
    "epsilon_low": "loss.low",
    "clip_ratio": "loss.low",
    "clip_ratio_low": "loss.low",
    "eps_clip": "loss.low",
    "epsilon_high": "loss.high",
    "clip_ratio_high": "loss.high",
    "scale_rewards": "advantages.adv_norm",
    "norm_adv_by_std_in_grpo": "advantages.adv_norm",
    "clip_ratio_c": "loss.dual",
    "delta": "loss.dual",
    "clip_low": "loss.low",
    "clip_high": "loss.high",
    "loss_type": "loss_agg",
    "loss_agg_mode": "loss_agg",
    "beta": "kl.coef",
    "kl_coef": "kl.coef",
    "kl_loss_coef": "kl.coef",
    "init_kl_coef": "kl.coef",
    "reference_policy_kl_penalty": "kl.coef",
    "kl_loss_type": "kl.estimator",
    "kl_estimator": "kl.estimator",
    "kl_penalty": "kl.estimator",
    "entropy_coeff": "entropy.coef",
    "entropy_coef": "entropy.coef",
    "entropy_loss_coef": "entropy.coef",
    "ent_coef": "entropy.coef",
    "target_entropy": "entropy.target",
    "lr_scheduler": "trainer.lr_schedule",
    "lr_scheduler_type": "trainer.lr_schedule",
    "lr_decay_style": "trainer.lr_schedule",
    "warmup_steps": "trainer.lr_warmup_steps",
    "min_lr_ratio": "trainer.lr_min_ratio",
    "sync_ref_model": "reference.refresh_every",
    "ref_model_sync_steps": "reference.refresh_every",
    "tis_clip": "correction.tis_clip",
    "tis_imp_ratio_cap": "correction.tis_clip",
    "rollout_is_threshold": "correction.tis_clip",
    "vllm_importance_sampling_cap": "correction.tis_clip",
    "critic_learning_rate": "critic.lr",
    "cliprange_value": "critic.value_clip",
    "value_clip": "critic.value_clip",
    "mini_batch_size": "minibatches",
    "ppo_mini_batch_size": "minibatches",
    "num_mini_batches": "minibatches",
    "ppo_epochs": "epochs",
    "num_ppo_epochs": "epochs",
    "num_iterations": "epochs",
    "max_num_gen_batches": "resampling_rounds",
    "filter_groups": "resampling_rounds",
    "dynamic_sampling": "resampling_rounds",
    "overlong_buffer": "shaping.overlong_tokens",
    "soft_punish_cache": "shaping.overlong_tokens",
    "mask_truncated_completions": "shaping.drop_truncated",
    "overlong_filtering": "shaping.drop_truncated",
    "overlong_buffer.len": "shaping.overlong_tokens",
    "overlong_buffer_length": "shaping.overlong_tokens",
    "overlong_buffer_penalty": "shaping.overlong_penalty",
    "ratio_clip_min": "loss.low",
    "ratio_clip_max": "loss.high",
    "ratio_clip_c": "loss.dual",
    "importance_sampling_level": "loss.level",
    "nll_loss_coef": "loss.nll_coef",
    "sft_loss_weight": "loss.nll_coef",
    "rpo_alpha": "loss.nll_coef",
    "minus_baseline": "advantages.baseline",
    "lambd": "advantages.lam",
    "gae_lambda": "advantages.lam",
    "gamma": "advantages.discount",
    "gae_gamma": "advantages.discount",
    "token_level_loss": "loss_agg",
    "loss_reduction": "loss_agg",
    "ref_update_interval": "reference.refresh_every",
    "truncated_importance_sampling_ratio": "correction.tis_clip",
    "use_dynamic_sampling": "resampling_rounds",
    "train_batch_size": "prompts_per_step",
    "rollout_batch_size": "prompts_per_step",
    "num_prompts_per_step": "prompts_per_step",
    "max_steps": "steps",
    "total_training_steps": "steps",
    "max_num_steps": "steps",
    "tensor_model_parallel_size": "trainer.layout.tensor_parallel",
    "tensor_parallel_size": "trainer.layout.tensor_parallel",
    "tp": "trainer.layout.tensor_parallel",
    "context_parallel_size": "trainer.layout.context_parallel",
    "ulysses_sequence_parallel_size": "trainer.layout.context_parallel",
    "cp": "trainer.layout.context_parallel",
    "fsdp_size": "trainer.layout.shard",
    "lora_rank": "trainer.lora.rank",
    "lora_r": "trainer.lora.rank",
    "lora_alpha": "trainer.lora.alpha",
    "target_modules": "trainer.lora.targets",
    "lora_target_modules": "trainer.lora.targets",
    "save_total_limit": "keep_checkpoints",
    "max_actor_ckpt_to_keep": "keep_checkpoints",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "max_norm": "trainer.max_grad_norm",
    "grad_clip": "trainer.max_grad_norm",
    "model_name_or_path": "model.path",
    "output_dir": "run_dir",
    "eval_steps": "eval_every",
    "test_freq": "eval_every",
    "save_steps": "save_every",
    "save_freq": "save_every",
    "report_to": "tracking.sinks",
    "logger": "tracking.sinks",
    "project_name": "tracking.project",
    "wandb_project": "tracking.project",
    "resume_from": "resume",
    "resume_from_checkpoint": "resume",
    "num_rollout_workers": "generator.num_replicas",
}

# Of foreign names whose value means something else there: what to change in it.
FOREIGN_VALUES = {
    "mini_batch_size": "is a number of them, not their size",
    "ppo_mini_batch_size": "is a number of them, not their size",
    "sft_loss_weight": "weighs the mean over the chosen's tokens; NeMo-RL's weighs their sum, by default",
}


def setting_names(config: Any, prefix: str = "") -> list[str]:
    """Every leaf of the nested config: "steps", "trainer.lr", ..."""
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        names += setting_names(value, f"{prefix}{field.name}.") if nested else [prefix + field.name]
    return names


def override(config: RunConfig, arguments: Sequence[str], prog: str) -> tuple[RunConfig, list[str]]:
    """Apply flags. Returns the changed config, and one line for each flag or value that makes no sense.

    Values out of bounds are left for `check_fields`, which reports them all. Prints and exits for --help.
    """
    if {"-h", "--help"} & set(arguments):
        _show_help(config, prog)
    flags, found = _flags(config, arguments)
    changed = config
    with postpone_refusals():  # a flag alone may conflict with one that follows
        for flag, *values in flags:
            try:
                changed = _with(changed, flag[2:].split("."), values)
            except ConfigError as error:
                found.append(str(error))
        return expand_paths(_without_what_was_switched_off(config, changed)), found


def _with(owner: Any, names: Sequence[str], values: Sequence[str], within: str = "") -> Any:
    """The part of the config with one field read from the command line. Raises ConfigError."""
    name, *rest = names
    path, current = f"{within}{name}", getattr(owner, name)
    if rest:
        new = _with(current, rest, values, f"{path}.")
    else:
        hint = type_hints(type(owner)).get(name, Any)
        new = _read(path, type(current) if hint is Any else hint, current, values)
    return dataclasses.replace(owner, **{name: new})


def _read(name: str, kind: Any, current: Any, values: Sequence[str]) -> Any:
    """A value of a type from words, as tyro reads it. name: of the setting, for the error."""
    holder = dataclasses.make_dataclass("Setting", [("value", kind, dataclasses.field(default=current))])
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read: Any = tyro.cli(holder, args=_words("--value", *values), use_underscores=True, config=_TYRO)
            return read.value
    except SystemExit:
        new = RENAMED.get((name, " ".join(values)))
        hint = f"; it is called {new} now" if new else ""
        raise ConfigError(
            f"--{name} {short(shlex.join(values))} must be {describe_type(kind)}{hint}"
        ) from None


def _flags(config: RunConfig, arguments: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Each known flag with its values, and what is wrong with the other arguments."""
    known, flags, found = setting_names(config), [], []
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") and argument.partition("=")[0].strip("-"):
            name, equals, value = argument[2:].partition("=")
            groups.append(["--" + name.replace("-", "_"), *([value] if equals else [])])
        elif groups:
            groups[-1].append(argument)
        else:
            found.append(_stray(argument, known))
    found += repeated(flag for flag, *_ in groups)
    for flag, *values in groups:
        name = flag[2:]
        if name not in known:
            found.append(_unknown(config, name, known))
            continue
        value = attrgetter(name)(config)
        if value is None or callable(value):
            found.append(f"--{name} is a part that is made in Python; set it in a recipe of your own")
            continue
        several = isinstance(value, tuple)
        if not values:
            found.append(f"--{name} has no value; write --{name} VALUE")
            continue
        if not several:
            found += [_stray(value, known, after=name) for value in values[1:]]
        flags.append([flag, *(values if several else values[:1])])
    return flags, found


def _stray(argument: str, known: Sequence[str], after: str = "") -> str:
    flag = argument.lstrip("-+")
    if "=" in argument and flag.split("=")[0] in known:
        return f"{shown(argument)} is no flag; write --{short(flag)}"
    where = f"--{after} takes one value; {shown(argument)} after it" if after else shown(argument)
    return f"{where} belongs to no setting; settings are written --section.field VALUE"


def _show_help(config: RunConfig, prog: str) -> None:
    """And exit."""
    tyro.cli(RunConfig, default=config, args=["--help"], prog=prog, use_underscores=True, config=_TYRO)


def _words(flag: str, *values: str) -> list[str]:
    """As one word with its first value, which may then begin with a dash."""
    return [f"{flag}={values[0]}", *values[1:]] if values else [flag]


def _without_what_was_switched_off(recipe: RunConfig, changed: RunConfig) -> RunConfig:
    """`--kl.coef 0` also takes away the recipe's other settings of the penalty, but not those given with it.

    Without a penalty those settings would have no effect.
    """
    if not recipe.kl.coef or changed.kl.coef:
        return changed
    if dataclasses.replace(changed.kl, coef=recipe.kl.coef) == recipe.kl:
        changed = dataclasses.replace(changed, kl=KL())
    if changed.reference == recipe.reference and not changed.algorithm.needs_reference:
        changed = dataclasses.replace(changed, reference=ReferenceConfig())
    return changed


def _unknown(config: RunConfig, name: str, known: Sequence[str]) -> str:
    """What to say of a name that is no setting: ours for it, or the nearest."""
    section, _, leaf = name.rpartition(".")
    if leaf == "temperature":
        return "there is no setting --temperature: training samples at 1, evaluation is greedy"
    if inside := [k for k in known if k.startswith(f"{name}.")]:
        return f"--{name} is a section, not a setting; its settings: {', '.join('--' + k for k in inside)}"
    same_leaf = [k for k in known if k.split(".")[-1] == leaf]
    # DPO's beta is not the KL's, and the generator's size not the trainer's.
    here = next((k for k in same_leaf if k.startswith(("loss.", "advantages."))), None)
    theirs = FOREIGN_NAMES.get(".".join(name.split(".")[-2:])) or FOREIGN_NAMES.get(leaf)
    if section and theirs:
        sibling = f"{section}.{theirs.split('.')[-1]}"
        here = here or (sibling if sibling in known else None)
    ours = here or theirs
    if ours in known:
        note = f", and {FOREIGN_VALUES[leaf]}" if leaf in FOREIGN_VALUES else ""
        return f"unknown setting --{name}; it is called --{ours} here{note}"
    in_section = [k for k in known if section and k.startswith(f"{section}.")]
    near = difflib.get_close_matches(leaf, [k.removeprefix(f"{section}.") for k in in_section], n=1)
    close = [f"{section}.{k}" for k in near] or same_leaf
    if not close and not in_section:
        close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{close[0]}? (--help lists them)" if close else "--help lists them"
    return f"unknown setting --{short(name)}; {hint}"
