"""The engine without Monarch: `torchrun --nproc-per-node 2 examples/engine_alone.py` memorizes a sentence."""

import os
from pathlib import Path

from rl.batching import pack, supervised_sample
from rl.loss.cross_entropy import CrossEntropy
from rl.models.engine_config import EngineConfig
from rl.models.layout import Layout
from rl.models.sources import TinyQwen3
from rl.models.titan import TitanEngine
from rl.models.tokenizer import HFTokenizer
from rl.types import OptimParams

# Any Hugging Face directory will do; seed draws random weights for this one, which has none.
model_dir = TinyQwen3(alphabet="abcdefghijklmnopqrstuvwxyz ").materialize(Path("runs/engine_alone"))
layout = Layout(shard=int(os.environ["WORLD_SIZE"]))
engine = TitanEngine(model_dir, EngineConfig(layout=layout, seed=0))
tokens = HFTokenizer(model_dir).encode("engines know nothing of roles")
batch = pack([supervised_sample(tokens[:1], tokens[1:])] * 4, num_ranks=layout.data_parallel)
for step in range(20):
    metrics = engine.forward_backward(batch, CrossEntropy())
    engine.optim_step(OptimParams(lr=3e-3, grad_scale=1 / batch.num_target_tokens))
    if engine.dp_rank == 0:
        print(f"step {step}: loss {metrics['loss:sum'] / metrics['tokens:sum']:.3f}", flush=True)
engine.save_hf("runs/engine_alone/hf")
