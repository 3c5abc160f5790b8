"""The command line's settings: a recipe's config, changed by `--section.field value`."""

import contextlib
import dataclasses
import difflib
import io
import re
from typing import Any

import tyro

from rl.controller.config import ReferenceConfig, RunConfig
from rl.errors import ConfigError
from rl.loss.kl import KL

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
    "num_rollout_workers": "generator.num_replicas",
}


def setting_names(config: Any, prefix: str = "") -> list[str]:
    """Every leaf of the nested config: "steps", "trainer.lr", ..."""
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        names += setting_names(value, f"{prefix}{field.name}.") if nested else [prefix + field.name]
    return names


def override(config: RunConfig, arguments: list[str], prog: str) -> RunConfig:
    """Apply flags. Raises ConfigError if a flag or value makes no sense; prints and exits for --help."""
    if not {"-h", "--help"} & set(arguments):
        _check_names(config, arguments)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            changed = tyro.cli(
                RunConfig,
                default=config,
                args=arguments,
                prog=prog,
                use_underscores=True,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
        return _without_what_was_switched_off(config, changed)
    except SystemExit as exit:
        if not exit.code:
            raise
        raise ConfigError(_one_line(said.getvalue())) from None


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


def _check_names(config: RunConfig, arguments: list[str]) -> None:
    known = setting_names(config)
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        name = argument[2:].split("=")[0].replace("-", "_")
        if name in known:
            continue
        if name.split(".")[-1] == "temperature":
            raise ConfigError(
                "there is no setting --temperature: training samples at 1, evaluation is greedy"
            )
        same_leaf = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
        own = next(
            (k for k in same_leaf if k.startswith(("loss.", "advantages."))), None
        )  # DPO's beta is not the KL's
        ours = (
            own or FOREIGN_NAMES.get(".".join(name.split(".")[-2:])) or FOREIGN_NAMES.get(name.split(".")[-1])
        )
        if ours in known:
            note = (
                ", and is a number of them, not their size"
                if ours == "minibatches" and "size" in name
                else ""
            )
            raise ConfigError(f"unknown setting --{name}; it is called --{ours} here{note}")
        close = same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean --{close[0]}? " if close else ""
        raise ConfigError(f"unknown setting --{name}; {hint}(--help lists them)")


def _one_line(box: str) -> str:
    """tyro's framed message without its frame."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    words = [line.strip("│╭╮╰╯─ ") for line in text.splitlines()]
    useful = [w for w in words if w and not w.startswith(("Parsing error", "For full helptext", "─"))]
    useful = useful[: next((i for i, w in enumerate(useful) if w.startswith("Argument helptext")), None)]
    if not useful:
        return "the settings could not be read (--help lists them)"
    return f"{useful[0]}: {' '.join(useful[1:])}"
