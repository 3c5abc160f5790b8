"""Other names of settings, values and modules: those of earlier versions, and those of other frameworks.

docs/renamed.md is this page for people.
"""

from collections.abc import Mapping
from typing import Any

RENAMED: dict[tuple[str, Any], str] = {
    ("placement", "separate"): "alone",
    ("placement", "shared"): "side_by_side",
}
"""(setting of a run, value of earlier versions) -> what it is called now."""
SPLIT = {"trainer.max_tokens": ("max_seq_len", "trainer.micro_batch_tokens")}
"""Setting of earlier versions -> the two that it is now, each with the value that it had."""
MOVED = {"rl.controller.config": "rl.config"}
"""Module of earlier versions, which recipes and config.json name -> where its classes are now."""

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""How other frameworks sample from another policy than the one that learns."""

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
    "rollout.tensor_model_parallel_size": "generator.tensor_parallel",  # verl's, of vLLM
    "vllm_cfg.tensor_parallel_size": "generator.tensor_parallel",  # NeMo-RL's
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


def with_new_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a config.json, of which earlier versions wrote some under other names."""
    renewed = {name: RENAMED.get((name, str(value)), value) for name, value in data.items()}
    for old, names in SPLIT.items():
        section, _, name = old.partition(".")
        if isinstance(fields := renewed.get(section), Mapping) and name in fields:
            value = fields[name]
            renewed[section] = {key: field for key, field in fields.items() if key != name}
            for new in names:
                of, _, setting = new.rpartition(".")
                target = renewed[of] if of else renewed
                target.setdefault(setting, value)
    return renewed
