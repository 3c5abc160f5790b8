"""Lockstep: the ranks of a tensor-parallel generator run the same commands in the order the first decides."""

import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from rl.models.generator.commands import Backend, Command, Load, Suspend, Tick

_IDLE = timedelta(days=365)  # how long the others may wait for rank 0 to have something to do


class Lockstep:
    """A backend on each rank. Rank 0 calls `tick`; the others run `follow`, which never returns."""

    def __init__(self, backend: Backend, num_ranks: int):
        self._backend = backend
        self._group = dist.new_group(backend="gloo", timeout=_IDLE) if num_ranks > 1 else None

    def tick(self, commands: Sequence[Command]) -> Tick:
        """Raises RuntimeError where another rank failed at what this one did."""
        if self._group is None:
            return self._backend.tick(commands)
        dist.broadcast_object_list([list(commands)], src=0, group=self._group)
        return self._tick_with_all(commands)

    def follow(self) -> None:
        """Never returns. A rank that fails ends its process: nobody else hears of it."""
        try:
            while True:
                received: list[list[Command]] = [[]]
                dist.broadcast_object_list(received, src=0, group=self._group)
                self._tick_with_all(received[0])
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _tick_with_all(self, commands: Sequence[Command]) -> Tick:
        tick = self._backend.tick(commands)
        if any(isinstance(command, Load | Suspend) for command in commands):
            failed = {number: str(a) for number, a in tick.answers.items() if isinstance(a, Exception)}
            on_all: list[dict[int, str]] = [{}] * dist.get_world_size(self._group)
            dist.all_gather_object(on_all, failed, group=self._group)
            if any(other.keys() != failed.keys() for other in on_all):
                raise RuntimeError(f"weights changed on some ranks alone; what failed on each: {on_all}")
        return tick
