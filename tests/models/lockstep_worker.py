"""One rank in lockstep with another, over a backend that does nothing, or fails on the second rank."""

import os
import sys
from dataclasses import dataclass

import torch.distributed as dist

from rl.errors import WeightsUnreachable
from rl.models.generator.commands import Load, Suspend, Tick
from rl.models.generator.lockstep import Lockstep
from rl.weight_sync.manifest import Manifest


@dataclass
class Backend:
    fails: str

    def tick(self, commands):
        rank = dist.get_rank()
        for command in commands:
            if isinstance(command, Suspend) and self.fails == "process" and rank == 1:
                raise ValueError("rank 1 has a bug")
            if isinstance(command, Load) and (self.fails == "both" or (self.fails == "second" and rank == 1)):
                return Tick({command.id: WeightsUnreachable(f"rank {rank} does not reach them")}, 0)
        return Tick(dict.fromkeys(command.id for command in commands), 0)


if __name__ == "__main__":
    rank, port, fails = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo")
    lockstep = Lockstep(Backend(fails), 2)
    if rank:
        lockstep.follow()
    try:
        answers = [lockstep.tick([command]).answers for command in (Load(1, Manifest(0, ())), Suspend(2))]
        print("answers", answers, flush=True)
    except RuntimeError as error:
        print("raised", error, flush=True)
    os._exit(0)
