"""SkyRL-Gym's environments (pip install skyrl-gym==0.4.0), over the rows of a question file."""

import importlib
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.envs.question_file import QuestionFile
from rl.types import Message, Problem, Rewards


@dataclass(frozen=True)
class SkyRLGym(ChatEnv):
    """Its observations are the next messages, its rewards those of the turns: see `turn_rewards`."""

    environment: str = "gsm8k_multi_turn"
    """A name that skyrl_gym.make takes. One of your own is MODULE:NAME: the module registers it."""
    options: tuple[tuple[str, Any], ...] = ()
    """Its env_config."""
    questions: QuestionFile = QuestionFile(match="exact")
    """The rows. Their answer is the environment's ground truth, unless they have a reward_spec of their own.
    What else they have is handed on: some environments read reward_model, db_id or data."""

    turn_rewards: bool = False
    """Its rewards turn by turn, for advantages that read them (GAE, ReinforcePP); else their sum."""

    def prepare(self) -> None:
        import skyrl_gym  # noqa: F401

        if self._module:
            importlib.import_module(self._module)

    @property
    def _module(self) -> str:
        return self.environment.rpartition(":")[0]

    def eval_problems(self) -> list[Problem]:
        return self._rows.eval_problems()

    def train_problem(self, seed: int) -> Problem:
        return self._rows.train_problem(seed)

    @property
    def _rows(self) -> QuestionFile:
        return replace(self.questions, num_eval=self.num_eval, match="exact")  # it scores nothing itself

    def start(self, episode: Episode) -> None:
        """Its first prompt is the conversation, whatever it has made of what is asked."""
        import skyrl_gym
        from omegaconf import DictConfig

        row = self._rows.row(episode.problem)
        extras = {
            "reward_spec": {"method": "rule", "ground_truth": episode.problem.answer},
            **{name: value for name, value in row.items() if name not in ("question", "answer", "messages")},
            "extra_info": {**(row.get("extra_info") or {}), "max_turns": self.max_turns},
            "max_turns": self.max_turns,
        }
        config, name = DictConfig(dict(self.options)), self.environment.rpartition(":")[2]
        environment = skyrl_gym.make(name, env_config=config, extras=extras)
        first, _ = environment.init([dict(message) for message in episode.messages])
        episode.state["env"], episode.state["rewards"] = environment, []
        episode.messages[:] = first

    def step(self, episode: Episode) -> list[Message] | None:
        out = episode.state["env"].step(episode.turn_texts[-1])  # its thoughts too, as there
        episode.state["rewards"].append(float(out["reward"]))
        return None if out["done"] else out["observations"]

    def reward_episode(self, episode: Episode) -> float | Rewards:
        """A turn that a budget cut off has none."""
        rewards = episode.state["rewards"]
        if not self.turn_rewards:
            return float(sum(rewards))
        return Rewards(turns=(*rewards, *[0.0] * (len(episode.turn_tokens) - len(rewards))))

    def validate(self) -> list[str]:
        if importlib.util.find_spec("skyrl_gym") is None:
            return ["the skyrl-gym package is missing; run: pip install skyrl-gym==0.4.0"]
        if self.questions.num_eval not in (QuestionFile.num_eval, self.num_eval):
            return [f"env.questions.num_eval={self.questions.num_eval} has no effect; set env.num_eval"]
        unread = [
            f"env.questions.{name} has no effect; set env.{name}"
            for name in ("prompt_prefix", "max_new_tokens", "stop", "chat")
            if getattr(self.questions, name) != getattr(QuestionFile, name)
        ]
        return unread or self._rows.validate()
