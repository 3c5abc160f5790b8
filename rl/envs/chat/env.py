"""ChatEnv: a task of several turns, with tools, in the model's own chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Le

from rl.bounds import PositiveFloat, PositiveInt
from rl.envs.base import Env, RolloutContext
from rl.envs.chat.episode import Episode
from rl.envs.chat.loop import play_group
from rl.envs.chat.tools import Tool, tools_of
from rl.errors import ConfigError
from rl.interfaces import Tokenizer
from rl.types import Message, Problem, Prompt, Rewards, Rollout, Verdict


@dataclass(frozen=True)
class ChatEnv(Env):
    """Derive from this class and implement `generate` and a reward. All else is optional:

    - methods marked with @tool, which the policy may call;
    - `step`, what the user says to a turn without a call;
    - `start`, what an episode needs before its first turn.

    All but `generate`, `opening` and demonstrations runs in a process of the episode's own, which
    is ended past its limits: whatever hangs or crashes costs its own sample.
    """

    chat: bool = True
    max_turns: Annotated[PositiveInt, Le(1000)] = 8
    """Most turns of the policy in an episode, each of up to max_new_tokens."""
    turn_seconds: PositiveFloat = 10.0
    """Time for what follows a turn: its tool calls, or step(); and for start(). Past it the episode is scored
    0, or dropped where it is in start()."""
    episode_seconds: PositiveFloat = 1800.0
    """Time for an episode, generation included."""
    max_episodes: PositiveInt = 256
    """Episodes under way at a time; each has a process."""
    max_result_chars: PositiveInt = 8192
    """What a tool returns is cut after so many characters."""
    max_memory_gib: PositiveFloat = 1.0
    """Memory that an episode's process may take for itself."""
    call_format: Literal["auto", "hermes", "llama3", "pythonic"] = "auto"
    """How the model writes tool calls. auto: as its chat template shows them."""

    def start(self, episode: Episode) -> str | Sequence[Message] | None:
        """Before the first turn: fill episode.state; may say more than the opening does. May be async."""
        return None

    def step(self, episode: Episode) -> str | Sequence[Message] | None:
        """What comes after a turn without tool calls: the user's next words, or messages; None: the end.

        May be async.
        """
        return None

    def reward_episode(self, episode: Episode) -> float | Rewards | Mapping[str, float] | Verdict:
        """Verify a whole episode. May be async.

        1 is success, as for `reward`. Named parts are summed, and each is a metric. Rewards(turns=...) has
        one for each turn of the policy.
        """
        if self.rewards_groups and type(self).reward is Env.reward:
            return 0.0
        return self.reward(episode.problem, episode.response, episode.stop)

    def reward_group(self, episodes: Sequence[Episode]) -> Sequence[float]:
        """For each of a problem's episodes, what is added to its own reward: to compare them. May be async.

        They have no `state`. Those that failed are not among them.
        """
        raise NotImplementedError

    @property
    def rewards_groups(self) -> bool:
        return type(self).reward_group is not ChatEnv.reward_group

    def unread(self) -> Mapping[str, str]:
        """Settings that have no effect here -> where that is, and the remedy."""
        return {}

    def tools(self) -> Sequence[Tool]:
        """What the policy may call: the methods that are marked with @tool."""
        return tools_of(self)

    def opening(self, problem: Problem) -> list[Message]:
        """The first messages: prompt_prefix as the system's, then the problem's question, or messages."""
        system: list[Message] = [{"role": "system", "content": self.prompt_prefix}]
        asked = problem.messages or ({"role": "user", "content": problem.question},)
        return [*(system if self.prompt_prefix else []), *asked]

    def chat_demonstration(self, problem: Problem, seed: int) -> Sequence[Message]:
        """The messages that supervised learning teaches after the opening; it learns the assistant's."""
        return [{"role": "assistant", "content": self.demonstration(problem, seed)}]

    def demonstration(self, problem: Problem, seed: int) -> str:
        """Of one turn."""
        raise ConfigError(
            f"{type(self).__name__} has no demonstrations, from which warmup.steps and data=demonstrations "
            f"learn; implement chat_demonstration()"
        )

    def most_sampled(self, longest: int) -> int:
        return min(self.max_new_tokens * self.max_turns, longest)

    def encode(self, problem: Problem, tokenizer: Tokenizer) -> Prompt:
        """Its tokens are made as the episode begins."""
        return Prompt(problem, ())

    async def drive(self, prompt: Prompt, n: int, context: RolloutContext) -> Sequence[Rollout]:
        return await play_group(self, prompt.problem, n, context)
