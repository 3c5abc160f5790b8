"""TextArena's single-player games (pip install textarena==0.7.4)."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from rl.bounds import PositiveInt
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.types import Message, Problem


@dataclass(frozen=True)
class TextArena(ChatEnv):
    """The game's words are the user's, the policy's turns its moves; the reward is the game's."""

    game: str = "GuessTheNumber-v0"
    """A name that textarena.make takes."""
    options: tuple[tuple[str, Any], ...] = ()
    """What else it takes, such as (("max_turns", 5),)."""
    num_eval: PositiveInt = 64
    max_turns: PositiveInt = 20

    def prepare(self) -> None:
        import textarena  # noqa: F401  seconds

    def generate(self, seed: int) -> Problem:
        return Problem(str(seed), f"{self.game} {seed}")

    def opening(self, problem: Problem) -> list[Message]:
        """The system's message alone: the game speaks first."""
        return [{"role": "system", "content": self.prompt_prefix}] if self.prompt_prefix else []

    def start(self, episode: Episode) -> str:
        episode.state["game"] = self._begun(int(episode.problem.id))
        return _new_text(episode)

    def step(self, episode: Episode) -> str | None:
        game = episode.state["game"]
        done, _ = game.step(action=episode.response)
        if not done:
            return _new_text(episode)
        rewards, _ = game.close()
        episode.state["reward"] = rewards[0]
        return None

    def reward_episode(self, episode: Episode) -> float:
        """0 where a budget ended the game."""
        return float(episode.state.get("reward", 0.0))

    def validate(self) -> list[str]:
        if importlib.util.find_spec("textarena") is None:
            return ["the textarena package is missing; run: pip install textarena==0.7.4"]
        limit = self._begun(0).state.max_turns
        if limit is not None and self.max_turns <= limit:
            return [
                f"{self.game} ends by itself after {limit} turns; env.max_turns={self.max_turns} cuts it "
                f"off before it says what it is worth; set env.max_turns={limit + 1}"
            ]
        return []

    def _begun(self, seed: int) -> Any:
        import textarena

        game = textarena.make(self.game, **dict(self.options))
        game.reset(num_players=1, seed=seed % 2**32)
        return game


def _new_text(episode: Episode) -> str:
    """What the game says now. Most games say all that they have said so far: the conversation has it."""
    text: str = episode.state["game"].get_observation()[1]
    before, episode.state["text"] = episode.state.get("text", ""), text
    return text.removeprefix(before).strip() or text
