"""What environments of both of the verifiers library's APIs have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.bounds import PositiveInt
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.episode import Episode

KEY_VARIABLE = "RL_EPISODE_API_KEY"
"""Where verifiers finds the episode's API key; by this name it keeps it from programs that it starts."""


@dataclass(frozen=True)
class VerifiersBase(AgentEnv):
    """It samples through the run's endpoint, and scores itself: agent() leaves state["reward"].

    It runs without the keys of this process, but for those that `variables` names.
    """

    environment: str = ""
    """v0: a name that verifiers.load_environment takes. v1: a taskset's id. Of an installed package, or a
    module."""
    options: tuple[tuple[str, Any], ...] = ()
    """What else it takes. v0: (("split", "train"),). v1: named as in verifiers' command line,
    (("taskset.split", "train"),)."""
    num_eval: PositiveInt = 32
    max_turns: PositiveInt = 32
    turn_seconds: float = 60.0
    max_memory_gib: float = 4.0

    def unread(self) -> Mapping[str, str]:
        why = "on an environment of verifiers, which asks and calls by itself; remove it"
        return dict.fromkeys(("command", "prompt_prefix", "max_result_chars"), why)

    def reward_episode(self, episode: Episode) -> float:
        """0 where a budget ended the episode before its reward."""
        return episode.state.get("reward", 0.0)
