"""One recipe for each algorithm, in the quickstart's setting: its model, task and warm start, two CPU cores.

Each names what makes it that algorithm; for a model of your own copy these lines into a recipe of your own.
Formulas, papers, and where other frameworks differ: docs/algorithms.md.
"""

from dataclasses import replace

from rl.config import CriticConfig, ReferenceConfig, RunConfig, TrainerConfig, WarmupConfig
from rl.configs.quickstart import quickstart
from rl.envs.sort_letters import SortLetters
from rl.loss.advantages.gae import GAE
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.advantages.reinforce_pp import ReinforcePP
from rl.loss.advantages.rloo import RLOO
from rl.loss.cispo import CISPO
from rl.loss.clip import Clip
from rl.loss.cross_entropy import CrossEntropy
from rl.loss.distillation import Distillation
from rl.loss.dpo import DPO
from rl.loss.gspo import GSPO
from rl.loss.importance_sampling import ImportanceSampling
from rl.loss.kl import KL
from rl.loss.shaping import Shaping
from rl.models.sources import ModelDir


def grpo() -> RunConfig:
    """GRPO as published: mean of each sequence, k3 penalty to the warm start in the loss."""
    return replace(
        quickstart(),
        loss=Clip(low=0.2, high=0.2),
        advantages=GroupMean(),
        loss_agg="seq_mean",
        kl=KL(coef=0.001, estimator="k3"),
    )


def dapo() -> RunConfig:
    """DAPO: clip-higher, token mean, dynamic sampling, overlong shaping."""
    return replace(
        quickstart(), loss=Clip(low=0.2, high=0.28), resampling_rounds=2, shaping=Shaping(overlong_tokens=1)
    )


def dr_grpo() -> RunConfig:
    """Dr.GRPO: no division by the group's deviation nor by the response's length."""
    return replace(
        quickstart(), loss=Clip(low=0.2, high=0.2), advantages=GroupMean(adv_norm="none"), loss_agg="constant"
    )


def gspo() -> RunConfig:
    """GSPO: ratios and clips of whole sequences, in two minibatches so that they differ from 1."""
    return replace(quickstart(), loss=GSPO(low=3e-3, high=4e-3), loss_agg="seq_mean", minibatches=2)


def cispo() -> RunConfig:
    """CISPO: clipped importance weights, a gradient for every token, in two minibatches."""
    return replace(quickstart(), loss=CISPO(high=4.0), minibatches=2)


def rloo() -> RunConfig:
    """RLOO: leave-one-out baseline, REINFORCE with ratios, k1 penalty in the reward."""
    return replace(
        quickstart(),
        loss=ImportanceSampling(),
        advantages=RLOO(),
        kl=KL(coef=0.01, estimator="k1", into="reward"),
    )


def reinforce_pp() -> RunConfig:
    """REINFORCE++: returns of tokens whitened over the batch, k1 penalty in the reward."""
    return replace(
        quickstart(),
        loss=Clip(low=0.2, high=0.2),
        advantages=ReinforcePP(),
        kl=KL(coef=0.01, estimator="k1", into="reward"),
    )


def ppo() -> RunConfig:
    """PPO: a critic, GAE, value clipping, two minibatches, k1 penalty in the reward."""
    return replace(
        quickstart(),
        loss=Clip(low=0.2, high=0.2),
        advantages=GAE(lam=0.95),
        critic=CriticConfig(lr=1e-3),
        kl=KL(coef=0.01, estimator="k1", into="reward"),
        minibatches=2,
    )


def sft() -> RunConfig:
    """Supervised learning on right demonstrations, from random weights."""
    return replace(
        quickstart(),
        env=SortLetters(corruption=0.0),
        warmup=WarmupConfig(),
        data="demonstrations",
        loss=CrossEntropy(),
        trainer=TrainerConfig(lr=3e-3),
        group_size=RunConfig.group_size,
        prompts_per_step=128,
        steps=600,
        eval_every=100,
    )


def dpo() -> RunConfig:
    """DPO: right answers preferred over the warm start's mistakes, with the chosen's likelihood kept up."""
    return replace(
        quickstart(),
        data="preferences",
        loss=DPO(beta=0.3, nll_coef=1.0),
        trainer=TrainerConfig(lr=3e-4),
        group_size=RunConfig.group_size,
        steps=60,
    )


def distillation() -> RunConfig:
    """On-policy distillation of what `rl train sft --run_dir runs/sft` learned: run that first."""
    return replace(
        quickstart(),
        loss=Distillation(),
        reference=ReferenceConfig(model=ModelDir("runs/sft/hf")),
        group_size=1,
    )
