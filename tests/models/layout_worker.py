"""Run under torchrun: three steps of one layout, with rank 0 writing what came out.

usage: layout_worker.py MODEL_DIR OUT REPLICATE SHARD TENSOR_PARALLEL CHECKPOINTING [CHECKPOINT_IN]
"""

import asyncio
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rl.batching import pack, supervised_sample
from rl.loss.policy import CrossEntropy
from rl.models.engine import TitanEngine
from rl.models.layout import Layout
from rl.types import OptimParams
from rl.weight_sync.manifest import Manifest, assemble
from rl.weight_sync.shared_memory import SharedMemory


def main() -> None:
    model_dir, out = sys.argv[1], Path(sys.argv[2])
    layout = Layout(*map(int, sys.argv[3:6]))
    engine = TitanEngine(model_dir, layout=layout, activation_checkpointing=sys.argv[6], seed=7)
    if len(sys.argv) > 7:
        engine.load_checkpoint(sys.argv[7])
    rng = np.random.default_rng(0)
    samples = [supervised_sample(rng.integers(0, 128, rng.integers(1, 9)), rng.integers(0, 128, rng.integers(1, 40))) for _ in range(9)]
    batch = pack(samples, num_ranks=layout.data_parallel, max_tokens=64, multiple_of=layout.tensor_parallel)
    result: dict = {"losses": [], "norms": [], "initial": {n: _full(p) for n, p in _parameters(engine)}}
    for step in range(3):
        metrics = engine.forward_backward(batch, CrossEntropy())
        loss = torch.tensor(metrics["loss:sum"], dtype=torch.float64) / layout.tensor_parallel
        dist.all_reduce(loss)
        if step == 0:
            result["gradients"] = {n: _full(p.grad) / batch.num_scored_tokens for n, p in _parameters(engine)}
        norm = engine.optim_step(OptimParams(lr=1e-3, grad_scale=1 / batch.num_scored_tokens))["grad_norm"]
        result["losses"].append(loss.item() / batch.num_scored_tokens)
        result["norms"].append(norm)
    result["logprobs"] = _gather(engine.forward(batch))
    result["weights"] = {n: _full(p) for n, p in _parameters(engine)}
    result["published"] = _publish(engine, out.parent)
    engine.save_checkpoint(out.with_suffix(".checkpoint"))
    if dist.get_rank() == 0:
        torch.save(result, out)
    dist.barrier()
    dist.destroy_process_group()


def _parameters(engine: TitanEngine) -> list:
    return [(n.replace("._checkpoint_wrapped_module", ""), p) for n, p in engine._model.named_parameters()]


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone().cpu()


def _gather(logprobs: dict) -> dict:
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, logprobs)
    return {sample: values for part in everyone for sample, values in part.items()}


def _publish(engine: TitanEngine, directory: Path) -> dict:
    """What a generator would assemble from every rank's shards."""
    transport = SharedMemory(str(directory))
    shards = asyncio.run(transport.publish(0, dist.get_rank(), engine.export()))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shards)
    fetched = asyncio.run(transport.fetch(Manifest(0, tuple(s for part in everyone for s in part))))
    return {name: tensor.clone() for name, tensor in assemble(fetched)}


main()
