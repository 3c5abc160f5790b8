"""What a user writes: a run's settings with their bounds and rules, and how they become a Plan.

A recipe imports RunConfig and its sections from here.
"""

from rl.config.run import CriticConfig as CriticConfig
from rl.config.run import JudgeConfig as JudgeConfig
from rl.config.run import ReferenceConfig as ReferenceConfig
from rl.config.run import RunConfig as RunConfig
from rl.config.run import WarmupConfig as WarmupConfig
from rl.models.layout import Layout as Layout
from rl.observability.sinks import TrackingConfig as TrackingConfig
from rl.plan.sections import GeneratorConfig as GeneratorConfig
from rl.plan.sections import RewardConfig as RewardConfig
from rl.plan.sections import TrainerConfig as TrainerConfig
from rl.plan.sections import WeightSyncConfig as WeightSyncConfig
from rl.waiting import Deadlines as Deadlines
