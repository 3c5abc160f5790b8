"""Losses, advantage estimators and what goes with them. They need nothing of a run.

In a run a recipe names them; `padded_loss` and `padded_advantages` take rows [B, T] of any other trainer.
"""

from rl.loss.advantages.gae import GAE as GAE
from rl.loss.advantages.group_mean import GroupMean as GroupMean
from rl.loss.advantages.reinforce_pp import ReinforcePP as ReinforcePP
from rl.loss.advantages.rloo import RLOO as RLOO
from rl.loss.cispo import CISPO as CISPO
from rl.loss.clip import Clip as Clip
from rl.loss.correction import Correction as Correction
from rl.loss.cross_entropy import CrossEntropy as CrossEntropy
from rl.loss.distillation import Distillation as Distillation
from rl.loss.dpo import DPO as DPO
from rl.loss.dro import DRO as DRO
from rl.loss.entropy import EntropyBonus as EntropyBonus
from rl.loss.gspo import GSPO as GSPO
from rl.loss.importance_sampling import ImportanceSampling as ImportanceSampling
from rl.loss.kl import KL as KL
from rl.loss.objective import Objective as Objective
from rl.loss.padded import padded_advantages as padded_advantages
from rl.loss.padded import padded_loss as padded_loss
from rl.loss.shaping import Shaping as Shaping
