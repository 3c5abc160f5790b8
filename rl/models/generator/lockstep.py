"""Lockstep: the ranks of a tensor-parallel generator run the same commands in the order the first decides."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from rl.models.generator.commands import Backend, Command, Tick

_IDLE = timedelta(days=365)  # how long the others may wait for rank 0 to have something to do


class Lockstep:
    """A backend on each rank. Rank 0 calls `tick`; the others run `follow`, which never returns."""

    def __init__(self, backend: Backend, num_ranks: int):
        self._backend = backend
        self._group = dist.new_group(backend="gloo", timeout=_IDLE) if num_ranks > 1 else None

    def tick(self, commands: Sequence[Command]) -> Tick:
        if self._group is not None:
            dist.broadcast_object_list([list(commands)], src=0, group=self._group)
        return self._backend.tick(commands)

    def follow(self) -> None:
        while True:
            received: list[list[Command]] = [[]]
            dist.broadcast_object_list(received, src=0, group=self._group)
            self._backend.tick(received[0])
