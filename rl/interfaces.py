"""The few seams: what the parts ask of each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from rl.types import Completion, Message, PolicyVersion, Problem, SamplingParams, Score, StopReason

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rl.envs.chat.episode import EndedEpisode, Opening, Reply
    from rl.envs.chat.session import ChatSession
    from rl.loss.advantages.base import Groups
    from rl.loss.base import LossOutput, TokenInputs
    from rl.weight_sync.manifest import LocalShard, Manifest, Shard


class Loss(Protocol):
    """A picklable callable: logprobs [M] with gradient -> a sum over tokens, and metrics.

    Attributes it may have:

    - `needs_reference = True` asks for the loss input ref_logprobs.
    - `drops_zero_advantages = True` says that a sequence of advantages 0 has no gradient, and need not be
      computed.
    - `needs_rewards = False` says that advantages are not read.
    - `learns_from = "rollouts"`, "demonstrations" or "preferences" says what it is made for, and refuses
      other data. One of preferences gets pairs: sequences 2i and 2i + 1, in one micro-batch.
    - `needs_teacher = True` asks for `reference.model`: another model than the policy was.
    """

    def __call__(self, logprobs: torch.Tensor, inputs: TokenInputs, /) -> LossOutput: ...


class AdvantageEstimator(Protocol):
    """A picklable callable: the step's groups of trajectories -> advantages.

    For each trajectory it gives advantages [M], or one for all tokens. Attributes it may have:

    - `needs_critic = True`, with a method `returns(groups)`: what the critic learns to say.
    - `compares_in_groups = True` says that a group of one teaches nothing.
    - `reads_turns = False` says that it reads a rollout's whole reward, not where in it rewards were earned.
    - `group_by_group = True` says that a group's advantages depend on no other group.
    """

    def __call__(self, groups: Groups, /) -> Sequence[Sequence[float | np.ndarray]]: ...


class EstimatorWithCritic(AdvantageEstimator, Protocol):
    """One with `needs_critic = True`."""

    def returns(self, groups: Groups, /) -> Sequence[Sequence[float | np.ndarray]]: ...


class Sampler(Protocol):
    """What an environment samples from."""

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]: ...


class EpisodeProcess(Protocol):
    """Where an environment's code runs for one episode.

    Every call has a deadline. Raises EpisodeFailed where that code failed, EpisodeLost where its process is
    gone for no fault of its own.
    """

    async def begin(self) -> Opening: ...
    async def step(self, message: Message, malformed: Sequence[str], tokens: Sequence[int]) -> Reply:
        """After a turn of the policy. Where that was the last one, the reply has the episode's score."""
        ...

    async def act(self, base_url: str, api_key: str) -> None:
        """Begin, and have the environment's agent talk to the policy over HTTP, until it is done."""
        ...

    async def score(
        self,
        stop: StopReason,
        untold: Sequence[Message],
        turn_tokens: Sequence[Sequence[int]],
        answers: Sequence[str],
    ) -> Score:
        """Of an episode that something else has ended.

        untold: messages that no `step` was told of. turn_tokens, answers: the policy's turns among them.
        """
        ...

    async def score_group(self, members: Sequence[EndedEpisode]) -> Sequence[Score]:
        """Of a problem's episodes after their end, in any process of them."""
        ...


class Episodes(Protocol):
    """Opens a process for each episode; waits while there are too many."""

    def open(self, problem: Problem, seed: int) -> AbstractAsyncContextManager[EpisodeProcess]: ...


class Door(Protocol):
    """An OpenAI-compatible endpoint, at which each session has a key."""

    async def enter(self, session: ChatSession) -> tuple[str, str]:
        """Its base URL, and the session's key."""
        ...

    async def leave(self, key: str) -> Sequence[Message]:
        """No more requests are taken; the conversation as its last request and answer left it."""
        ...

    async def close(self) -> None: ...


class Tokenizer(Protocol):
    """Text to tokens once, and back for people and verifiers."""

    eos_id: int
    chat_template: str  # empty where there is none

    def encode(self, text: str) -> list[int]: ...
    def encode_plain(self, text: str) -> list[int]: ...
    def encode_chat(self, user: str, system: str = "") -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def decode_with_special(self, tokens: Sequence[int]) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...
    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        """A conversation as text, by the chat template. tools: as OpenAI's API describes them."""
        ...


class Transport(Protocol):
    """Moves weights between processes.

    Weights are versioned, so that no reader ever sees half of one version and half of another. A version is
    readable from the moment its manifest exists until `release`, which its owner, the WeightStore, calls.
    """

    async def publish(
        self, name: str, version: PolicyVersion, rank: int, shards: Iterable[LocalShard]
    ) -> list[Shard]:
        """In a trainer rank's process. `name`: "model", or an adapter's."""
        ...

    def prefetch(self, manifest: Manifest) -> None:
        """What takes long before a `fetch`, in another thread of one process of its host.

        A generator decodes meanwhile. Does nothing where `fetch` is fast. Raises WeightsUnreachable where the
        version cannot be reached.
        """
        ...

    def fetch(self, manifest: Manifest) -> dict[str, list[tuple[Shard, torch.Tensor]]]:
        """In a thread of each process that computes with the weights."""
        ...

    async def release(self, manifest: Manifest) -> None:
        """In the controller's process."""
        ...
