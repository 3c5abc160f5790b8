"""Backend: what computes for the service. Plain data in and out: it knows nothing of HTTP or of tenants."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl.errors import RunError
from rl.types import Completion, LoRA, OptimParams, SamplingParams


class UserError(Exception):
    """What the request's author can fix; the message says how. It changed nothing."""


class ContextExceeded(UserError):
    """There is no room for a prompt, or behind it. Clients tell it from others by its status, 400."""


class NotFound(Exception):
    """There is no such thing, or it is another tenant's."""


class GeneratorsDied(RunError):
    """So many generators died of a request, or beside it, as it may see."""


class ModelsLost(RunError):
    """The training engine died and was started again: every model has to be restored."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence, of N tokens. Position i predicts the target at i."""

    tokens: np.ndarray  # [N] int64
    targets: np.ndarray  # [N] or [N, K] int64
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)  # float32, of the targets' shape


@dataclass(frozen=True, slots=True)
class Learned:
    """What forward_backward gives. Logprobs are of the policy before the next optim_step."""

    logprobs: list[
        np.ndarray
    ]  # of each datum, float32 nats, of its targets' shape; 0 where nothing was asked
    metrics: Mapping[str, float]  # named `name:reduction`


class Backend(ABC):
    """LoRA models by name on one base model, and sampling with it or with any adapter directory.

    Calls that concern one model are never made at the same time; all training calls come one after the other.
    """

    context_length: int  # tokens of prompt and answer
    vocab_size: int

    @abstractmethod
    async def create(self, model: str, lora: LoRA, seed: int) -> None:
        """A new adapter, which changes nothing until it learns."""

    @abstractmethod
    async def remove(self, model: str) -> None: ...

    @abstractmethod
    async def forward_backward(
        self, model: str, data: Sequence[Datum], loss: str, config: Mapping[str, float], forward_only: bool
    ) -> Learned:
        """Adds the gradient of the loss, a sum over targets. Raises UserError for what cannot be computed."""

    @abstractmethod
    async def optim_step(self, model: str, params: OptimParams) -> dict[str, float]: ...

    @abstractmethod
    async def save(self, model: str, directory: Path, optimizer: bool) -> None:
        """An adapter in PEFT's format; with `optimizer`, its state beside it."""

    @abstractmethod
    async def load(self, model: str, directory: Path, optimizer: bool) -> None:
        """The model becomes what `save` wrote, whether or not it is there already."""

    @abstractmethod
    async def sample(
        self,
        adapter: Path | None,
        prompt: Sequence[int],
        n: int,
        params: SamplingParams,
        max_deaths: int = 3,
    ) -> list[Completion]:
        """With an adapter's directory, which never changes, or with the base model.

        Sample i is drawn with seed `params.seed + i`. Who cancels it ends it in the generators too. Raises
        GeneratorsDied where so many died.
        """
