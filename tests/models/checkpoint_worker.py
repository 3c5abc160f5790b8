"""Run under torchrun: trains and is killed while it writes a checkpoint, or goes on from the latest.

usage: checkpoint_worker.py train|resume MODEL_DIR DIRECTORY SHARD TENSOR_PARALLEL
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from rl.batching import pack, supervised_sample
from rl.loss.cross_entropy import CrossEntropy
from rl.models.checkpoint_dir import latest
from rl.models.engine_config import EngineConfig
from rl.models.layout import Layout
from rl.models.titan import TitanEngine
from rl.types import LoRA, OptimParams


def main() -> None:
    mode, model_dir, directory = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    layout = Layout(shard=int(sys.argv[4]), tensor_parallel=int(sys.argv[5]))
    torch.set_num_threads(1)
    losses = {}
    for kind, adapter in (("full", None), ("lora", "a")):
        engine = TitanEngine(model_dir, EngineConfig(layout=layout, seed=7, adapters=adapter is not None))
        if mode == "train":
            if adapter:
                engine.adapters.add(adapter, LoRA(4))
            for step in range(3):
                learn(engine, step, adapter)
                state = {"next_step": step + 1}
                engine.save(directory / kind / f"step-{step}", state, keep_last=2, wait=False)
            engine.wait_for_save()
            first = 3
        else:
            path = latest(directory / kind)
            first = engine.load(path)["next_step"]
        continued = [learn(engine, step, adapter) for step in range(first, first + 3)]
        losses[kind] = {"first": first, "losses": continued}
    if dist.get_rank() == 0:
        (directory / f"{mode}-{layout.shard}-{layout.tensor_parallel}.json").write_text(json.dumps(losses))
    dist.barrier()
    if mode == "train":
        die_while_writing(engine, directory / "lora" / "step-3")
    dist.destroy_process_group()


def learn(engine: TitanEngine, step: int, adapter: str | None) -> float:
    rng = np.random.default_rng(step)
    samples = [
        supervised_sample(rng.integers(0, 128, 4), rng.integers(0, 128, rng.integers(1, 40)))
        for _ in range(6)
    ]
    layout = engine.config.layout
    batch = pack(samples, num_ranks=layout.data_parallel, multiple_of=engine.config.row_multiple)
    own = engine.forward_backward(batch, CrossEntropy(), adapter)["loss:sum"]
    loss = torch.tensor(own, dtype=torch.float64) / layout.procs_per_row
    dist.all_reduce(loss)
    engine.optim_step(OptimParams(lr=1e-3, grad_scale=1 / batch.num_target_tokens), adapter)
    return loss.item() / batch.num_target_tokens


def die_while_writing(engine: TitanEngine, path: Path) -> None:
    FileSystemWriter.write_data = lambda *args: time.sleep(60)
    engine.save(path, wait=False)
    assert path.with_name(path.name + ".partial").is_dir()
    os.kill(os.getpid(), signal.SIGKILL)


main()
