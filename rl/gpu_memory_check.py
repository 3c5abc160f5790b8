"""The check of `rl gpu-check` that compares the memory of a training step with the Plan's figure.

Imports are inside, as in gpu_checks.py.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from rl.gpu_checks import make_engine
from rl.models.known_shapes import known_config

LEAST_GIB = 32.0
"""Of a GPU: the plain step took 25.6 on an H200."""
_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": "full"},
    "compiled": {"compile": True},
    "adapter": {"adapters": True},
}
_FLOAT8 = {"compile": True, "float8": True}


def memory(_: Path) -> dict[str, Any]:
    """A training step of Qwen3-0.6B's shape, with random weights. Raises where the Plan is 15% off."""
    import torch

    from rl.cluster.environment import engine_environment

    os.environ.update(engine_environment(1))  # before CUDA's allocator starts
    figures: dict[str, Any] = {}
    ways = _WAYS | ({"float8": _FLOAT8} if torch.cuda.get_device_capability() >= (8, 9) else {})
    with tempfile.TemporaryDirectory(prefix="rl-gpu-check-") as scratch:
        directory = Path(scratch)
        (directory / "config.json").write_text(json.dumps(_qwen3_0_6b()))
        for way, settings in ways.items():
            figures |= {f"{way}, {name}": value for name, value in _step(directory, settings).items()}
    for way in ways:
        if not 0.85 < figures[f"{way}, of the plan"] < 1.15:
            raise RuntimeError(f"{way}: {figures[f'{way}, of the plan']:.2f} of what is planned")
    return figures


def _qwen3_0_6b() -> dict[str, Any]:
    shape = known_config("Qwen/Qwen3-0.6B")
    assert shape is not None
    return shape | {"max_position_embeddings": 4096}


def _step(model: Path, settings: dict[str, Any]) -> dict[str, float]:
    """Of a full micro-batch in bfloat16, on a GPU with nothing else on it; the third of three."""
    import gc

    import numpy as np
    import torch

    from rl.batching import pack, supervised_sample
    from rl.loss.cross_entropy import CrossEntropy
    from rl.models.hf import read_config
    from rl.plan.memory import GIB, engine_memory
    from rl.plan.model_shape import ModelShape
    from rl.types import LoRA, OptimParams

    hf, rng = read_config(model), np.random.default_rng(0)
    shape, adapter = ModelShape.of(hf), "lora" if settings.get("adapters") else None
    engine = make_engine(model, dtype="bfloat16", seed=0, **settings)
    if adapter:
        engine.adapters.add(adapter, LoRA(rank=16), seed=0)
    num_tokens = engine.config.micro_batch_tokens
    for _ in range(3):  # the optimizer's state is there from the second on
        rows = rng.integers(3, hf["vocab_size"], (num_tokens // 512, 512)).tolist()
        samples = [supervised_sample(row[:1], row[1:]) for row in rows]
        batch = pack(samples, max_tokens=num_tokens, multiple_of=engine.config.row_multiple)
        torch.cuda.synchronize()
        began = time.monotonic()
        engine.forward_backward(batch, CrossEntropy(), adapter)
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
        engine.optim_step(OptimParams(lr=1e-5), adapter)
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()  # CUDA's context
    taken = torch.cuda.max_memory_reserved() + outside
    planned = engine_memory(shape, engine.config, LoRA(rank=16), learns=True, on_cpu=False).total
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    flops = (4 if adapter else 6) * shape.matrices * num_tokens
    return {"GiB": taken / GIB, "of the plan": taken / planned, "TFLOP/s": flops / seconds / 1e12}
