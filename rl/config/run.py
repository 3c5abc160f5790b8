"""RunConfig: all settings of a run, frozen. What is wrong with them: validate.py."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl.bounds import FilePath, NonNegativeFloat, NonNegativeInt, PositiveCacheGib, PositiveInt, Seed
from rl.config.algorithm import Algorithm
from rl.envs.base import Env
from rl.loss.advantages.group_mean import GroupMean
from rl.loss.aggregate import LossAgg
from rl.loss.clip import Clip
from rl.loss.correction import Correction
from rl.loss.entropy import EntropyBonus
from rl.loss.kl import KL
from rl.loss.shaping import Shaping
from rl.models.layout import Layout
from rl.models.sources import ModelSource
from rl.observability.sinks import TrackingConfig
from rl.plan.demand import DType, Sharing
from rl.plan.roles import ROLES, RoleName
from rl.plan.sections import GeneratorConfig as GeneratorConfig
from rl.plan.sections import Hosts
from rl.plan.sections import RewardConfig as RewardConfig
from rl.plan.sections import TrainerConfig as TrainerConfig
from rl.plan.sections import WeightSyncConfig as WeightSyncConfig
from rl.types import DataKind
from rl.waiting import Deadlines

ReferenceKind = Literal["none", "teacher", "adapter", "policy"]


@dataclass(frozen=True)
class ReferenceConfig:
    """The reference policy, or teacher: there where the loss or the KL penalty asks for one."""

    model: ModelSource | None = None
    """The teacher; none means the policy as it is when RL begins."""
    refresh_every: NonNegativeInt = 0
    """Steps after which the reference becomes what the policy then is; 0 is never."""
    layout: Layout = Layout()
    hosts: Hosts = ()
    """As trainer.hosts."""


@dataclass(frozen=True)
class CriticConfig:
    """The critic: only where the advantage estimator asks for one (GAE). It starts from the policy's weights
    when RL begins."""

    lr: NonNegativeFloat = 1e-5
    """Learning rate, with the trainer's lr_schedule, betas, eps and weight_decay."""
    value_clip: NonNegativeFloat = 0.2
    """How far values may move from those the advantages were computed with; 0 is no clip."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm; 0 turns clipping off."""
    layout: Layout = Layout()
    hosts: Hosts = ()
    """As trainer.hosts."""


@dataclass(frozen=True)
class JudgeConfig:
    """A language model of the run's own that grades: an envs.judge.Judge without a base_url asks it."""

    model: ModelSource | None = None
    """The judge; none means there is none."""
    num_replicas: PositiveInt = 1
    """Engines, each with the whole model."""
    tensor_parallel: PositiveInt = 1
    """Processes of each engine, which split its layers; all on one host."""
    max_tokens: PositiveInt = 4096
    """Longest question with its verdict, in tokens, where the model allows so many."""
    kv_cache_gib: PositiveCacheGib = 1.0
    """Memory of each process's key-value cache."""
    hosts: Hosts = ()
    """As generator.hosts."""


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on the environment's demonstrations before the first RL step, with an optimizer
    of their own."""

    steps: NonNegativeInt = 0
    """Number of supervised steps."""
    batch_size: PositiveInt = 128
    """Demonstrations of a step."""
    lr: NonNegativeFloat = 0.0
    """Learning rate, constant. 0: 3e-3 for random weights, 1e-4 for pretrained ones, of an adapter 5e-4."""


@dataclass(frozen=True)
class RunConfig:
    """A run: what learns, from what, and how. The defaults are GRPO's; the recipes in configs/ name the other
    algorithms' parts."""

    model: ModelSource
    env: Env
    trainer: TrainerConfig = TrainerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    reward: RewardConfig = RewardConfig()
    judge: JudgeConfig = JudgeConfig()
    data: DataKind = "rollouts"
    """rollouts: RL on the policy's own samples. demonstrations, preferences: supervised, on what
    env.demonstration and env.preference give for prompts_per_step problems."""
    loss: Any = Clip()  # an interfaces.Loss: one of rl/loss, or a function
    advantages: Any = GroupMean()  # an interfaces.AdvantageEstimator: of rl/loss/advantages, or a function
    loss_agg: LossAgg = "token_mean"
    """token_mean: over all tokens of a minibatch (DAPO). seq_mean: over sequences, each the mean of its
    tokens (GRPO). constant: the sum divided by sequences * env.max_new_tokens (Dr.GRPO), in an episode of
    turns times env.max_turns, at most max_seq_len (of an AgentEnv: without that limit)."""
    correction: Correction = Correction()
    kl: KL = KL()
    entropy: EntropyBonus = EntropyBonus()
    reference: ReferenceConfig = ReferenceConfig()
    critic: CriticConfig = CriticConfig()
    shaping: Shaping = Shaping()
    warmup: WarmupConfig = WarmupConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    tracking: TrackingConfig = TrackingConfig()
    deadlines: Deadlines = Deadlines()
    max_seq_len: PositiveInt = 8192
    """Most tokens of a sequence, prompt included; fewer where the model has fewer positions."""
    steps: PositiveInt = 100
    """RL steps."""
    prompts_per_step: PositiveInt = 32
    """Prompts of a step."""
    max_offpolicy_steps: NonNegativeInt = 0
    """How many steps a rollout may lag behind: begun with version v, it is trained on at version v + so many
    at the latest. 0 is the synchronous loop; with 1 or more, generation, training and weight sync overlap."""
    stream_groups: NonNegativeInt = 0
    """Add the gradient of so many groups of a step as soon as they are finished, while others are still
    generated; 0 waits for the whole step. The update is the same, but for the order of its sums."""
    group_size: PositiveInt = 8
    """Rollouts of each prompt, over which advantages are computed."""
    minibatches: PositiveInt = 1
    """Optimizer steps for each pass over a step's prompts, each on as many of them."""
    epochs: PositiveInt = 1
    """Passes over a step's rollouts."""
    resampling_rounds: NonNegativeInt = 0
    """Dynamic sampling (DAPO): groups whose rewards are all the same make way for new prompts, at most so
    many times prompts_per_step of them in a step."""
    dtype: DType = "auto"
    """In which trainer and generator compute. auto: float32 on a CPU, bfloat16 on GPUs. fastest: bfloat16 on
    CPUs with instructions for it too. Master weights, gradient reduction and optimizer state are always
    fp32."""
    max_logprob_diff: NonNegativeFloat = 0.0
    """Most nats by which generator and trainer may differ, on average over the tokens of a step that the
    learning policy sampled. Over it at the first step, or for ten steps in a row, the run ends. 0: 3e-3 in
    float32 and 0.1 in bfloat16, where rounding alone makes 0.01 to 0.03; no limit with float8 or dropout."""
    hosts: str = ""
    """The run's hosts, as 10.0.0.1:7000,10.0.0.2:7000, each with an `rl worker` that listens there. Empty:
    this host alone."""
    joining_hosts: NonNegativeInt = 0
    """How many more hosts may join the run, and leave it again, at any time: `rl worker --join`. They have
    the numbers after those of `hosts`, and what the last of those has. Only generators are there."""
    placement: Sharing = "auto"
    """GPUs of the processes of trainer, generators, critic, reference and judge. alone: one for each.
    side_by_side: dealt out in turn, so that roles share them. by_turns: who does not work in a phase leaves
    its GPU, or, on a CPU, its memory. auto: alone, side by side where there are too few, by turns where
    GPUs are full."""
    seed: Seed = 0
    """All randomness follows from it and from the prompt's index, the sample and, for minibatches, the
    step."""
    eval_every: PositiveInt = 20
    """Steps between evaluations on the held-out problems. The policy before the first step and the one after
    the last are evaluated, too."""
    save_every: NonNegativeInt = 20
    """Steps between checkpoints; 0 is none by steps. The last step has one, and a run that is interrupted."""
    save_every_minutes: NonNegativeFloat = 10.0
    """Also one after each step whose next would end later than this after the last checkpoint, so that more
    work is not lost; 0 is none by time."""
    keep_checkpoints: NonNegativeInt = 2
    """How many of the newest checkpoints to keep; 0 keeps all."""
    record_rollouts: NonNegativeInt = 4
    """Rollouts of each step and evaluation to record: in words in rollouts.jsonl, with all tokens, logprobs
    and advantages in rollouts/. Beside them up to 32 that failed."""
    record_batches: NonNegativeInt = 0
    """Keep what the newest so many steps learned from, for rl replay: at least save_every. 0 keeps none."""
    resume: FilePath = ""
    """A checkpoint (runs/.../checkpoints/step-N), a run's directory for its newest, or `latest`: the newest
    in run_dir, else what the run there began from; without run_dir, of this recipe in runs/. Go on after its
    step, with its weights and optimizer."""
    run_dir: FilePath = ""
    """Where everything is written; empty means runs/<recipe>-<time>."""
    trace: bool = False
    """Write trace.json: what every process was asked to do and when; https://ui.perfetto.dev opens it."""

    @property
    def algorithm(self) -> Algorithm:
        """How groups become updates, and what that needs."""
        names = [field.name for field in dataclasses.fields(Algorithm) if field.name != "max_new_tokens"]
        most = self.env.most_sampled(self.max_seq_len)
        return Algorithm(**{name: getattr(self, name) for name in names}, max_new_tokens=most)

    @property
    def engines(self) -> dict[RoleName, Layout]:
        """The engines beside the trainer that the algorithm needs, with the layout of each."""
        needed: dict[RoleName, bool] = {
            "critic": self.algorithm.needs_critic,
            "reference": self.algorithm.needs_reference and not self.reference_is_adapter,
        }
        return {role: getattr(self, role).layout for role, is_needed in needed.items() if is_needed}

    def model_of(self, role: RoleName) -> ModelSource:
        """That of the role's section, where it names one; else the policy's."""
        return getattr(getattr(self, role), "model", None) or self.model

    def without_weights(self) -> "RunConfig":
        """With models of which, on the Hub, the weights are not fetched: for commands that start nothing."""
        return self.with_models(lambda role, model: model.without_weights())

    def with_models(self, change: Callable[[RoleName, ModelSource], ModelSource]) -> "RunConfig":
        """With another in the place of each model that is named: the policy's, which is the trainer's, and
        those in sections of roles."""
        sections = [(role, getattr(self, role)) for role in ROLES]
        changes = {
            role: dataclasses.replace(section, model=change(role, section.model))
            for role, section in sections
            if getattr(section, "model", None) is not None
        }
        return dataclasses.replace(self, model=change("trainer", self.model), **changes)

    @property
    def reference_is_adapter(self) -> bool:
        """Whether the reference lives in the trainer, beside the adapter that is the policy."""
        return self.algorithm.needs_reference and self.reference.model is None and self.trainer.lora.rank > 0

    @property
    def reference_kind(self) -> ReferenceKind:
        """What a checkpoint's reference has to be for this run to go on from it."""
        if not self.algorithm.needs_reference:
            return "none"
        if self.reference.model is not None:
            return "teacher"
        return "adapter" if self.reference_is_adapter else "policy"
