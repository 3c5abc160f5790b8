"""What a generator's engine is told between two decoding steps, and what it answers.

Plain data, for every rank alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl.types import Completion, SamplingParams
from rl.weight_sync.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Admit:
    """One sample to draw, with seed `params.seed`."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams

    def vllm_prompt(self) -> dict[str, Any]:
        """As vLLM's add_request takes it. The salt goes into the keys of all cached blocks."""
        salt = {"cache_salt": self.params.cache_group} if self.params.cache_group else {}
        return {"prompt_token_ids": list(self.prompt), **salt}


@dataclass(frozen=True, slots=True)
class Load:
    """Another version of the model, or of an adapter. Running requests go on; their cache is recomputed."""

    id: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Suspend:
    """Give back the memory of weights and cache, until the model is loaded again. Nothing is running."""

    id: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Requests that nobody waits for any more."""

    id: int
    requests: tuple[int, ...]


Command = Admit | Load | Suspend | Abort


@dataclass(frozen=True, slots=True)
class Tick:
    """What came of some commands and one decoding step.

    An answer is an exception where the command, or request, failed.
    """

    answers: dict[
        int, Completion | Exception | None
    ]  # of each command that is done: a Completion for Admit, else None
    num_running: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a generator's engine has come since it started."""

    num_ticks: int
    num_requests: int  # which it has taken and not yet answered


class Backend(Protocol):
    """What samples, in one process or in each rank of a generator: VLLM, or a test's fake."""

    def tick(self, commands: Sequence[Command]) -> Tick:
        """Run the commands in order, then decode one step."""
        ...
