"""One of two ranks: what one of them cannot read, and what one of them writes for too long, both hear of."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from rl.errors import ConfigError, RunError
from rl.models import checkpoint
from rl.models.adapters import Adapters
from rl.models.engine_config import EngineConfig
from rl.models.layout import Layout
from rl.models.learner import Learner
from rl.models.lora import Site
from rl.models.platform import init_process_group
from rl.types import LoRA

SECONDS, SLOW = 2.0, 5.0  # deadline of a checkpoint, and what the second rank takes


def adapters(rank: int, directory: Path) -> str:
    """What is in the place of an adapter that the second rank does not find."""
    linear = nn.Linear(8, 8, bias=False)
    sites = [Site("model.layers.0.self_attn.q_proj", linear)]
    members = Adapters(EngineConfig(adapters=True, layout=Layout(shard=2)), sites, None, torch.device("cpu"))
    for name, value in (("saved", 0.5), ("used", 0.25)):
        members.add(name, LoRA(2, 4, ("q_proj",)))
        with torch.no_grad():
            for parameter in members[name].parameters.values():
                parameter.fill_(value)
    members.save_state("saved", directory / "adapter", "base")
    seen = directory / ("adapter" if rank == 0 else "not-yet-there")
    ends = []
    for load in (lambda: members.load_state("used", seen), lambda: members.load("new", seen)):
        try:
            load()
            ends.append("loaded")
        except (ConfigError, RunError):
            ends.append("refused")
    values = {p.flatten()[0].item() for p in members["used"].parameters.values()}
    return f"{ends} {values} {sorted(members)}"


def late(rank: int, directory: Path) -> str:
    """How a checkpoint ends that the second rank still writes, and how once it has."""

    class NoAdapters:
        frozen = False

        def record(self) -> dict:
            return {}

    learner = Learner({"w": nn.Parameter(torch.ones(4))})
    written = checkpoint.Checkpoints(torch.device("cpu"), SECONDS, NoAdapters(), lambda: {"model": learner})
    if rank == 1:
        write = checkpoint._Writer.write_data

        def slow(*args):
            time.sleep(SLOW)
            return write(*args)

        checkpoint._Writer.write_data = slow
    written.save(directory / "step-1", {}, 0)
    ends = []
    for pause in (0.0, 0.0, SLOW):
        time.sleep(pause)
        try:
            written.wait()
            ends.append("written")
        except RunError as error:
            ends.append("late" if "raise deadlines.checkpoint" in str(error) else str(error))
    return str(ends)


if __name__ == "__main__":
    rank, port, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    init_process_group(60)
    print(adapters(rank, directory), late(rank, directory), sep="\n", flush=True)
    os._exit(0)
