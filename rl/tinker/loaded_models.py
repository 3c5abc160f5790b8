"""The models in the training engine, and which of them leaves to make room."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class LoadedModel:
    """In the engine."""

    tenant: str
    has_gradient: bool = False
    num_steps: int = 0  # since its snapshot
    needs_checkpoint: bool = False  # that it was loaded from, and that may be deleted: no snapshot came since

    def kept(self) -> None:
        """It has a snapshot of what it is."""
        self.num_steps, self.needs_checkpoint = 0, False


def next_to_leave(loaded: Mapping[str, LoadedModel], tenant: str) -> str:
    """For a model of the tenant. Of who then has the most in the engine, the one used longest ago.

    One with a gradient only where all of theirs have one. loaded: the one used longest ago first.
    """
    counts = Counter([tenant, *(state.tenant for state in loaded.values())])
    most = max(counts[state.tenant] for state in loaded.values())
    theirs = [id for id, state in loaded.items() if counts[state.tenant] == most]
    return next((id for id in theirs if not loaded[id].has_gradient), theirs[0])
