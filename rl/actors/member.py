"""What is behind a replica: processes of this run's, or a server elsewhere, by the verbs that it answers."""

from collections.abc import Sequence
from typing import Protocol

from rl.models.generator.wave import Wave
from rl.types import Completion, SamplingParams
from rl.weight_sync.manifest import Manifest


class Member(Protocol):
    """The processes behind a replica, once they answer."""

    async def check(self) -> None:
        """Raises ProcessDied where they are gone or hang."""
        ...

    async def kill(self) -> None:
        """End them, whatever they are doing."""
        ...


class GeneratorMember(Member, Protocol):
    """A generator. Its methods raise ProcessDied where it is gone, does not answer, or is as good as dead."""

    async def load_weights(self, manifest: Manifest) -> None:
        """Returns once it samples with them. WeightsUnreachable: a later version may be reached."""
        ...

    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, wave: Wave, key: int
    ) -> list[Completion]:
        """n of them. It admits the requests of one wave together. key: what `give_up_samples` names it by."""
        ...

    async def give_up_samples(self, keys: Sequence[int] | None = None) -> None:
        """Nobody waits for these requests any more; None: for any."""
        ...

    async def suspend(self) -> None:
        """Leave the device, until weights are loaded. It has no requests."""
        ...


class Visitor(Protocol):
    """A host that joins a run and leaves it, and the next that takes its place."""

    @property
    def visit(self) -> int:
        """A number of its own for each stay of a host; 0 while none is there."""
        ...

    async def arrival(self, last: int) -> None:
        """Returns once a host is there whose visit is another than the last."""
        ...
