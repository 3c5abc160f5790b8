"""The critic's engine: values in the place of logprobs, the same under every layout, from loaded weights."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.batching import pack
from rl.loss.value import ClippedValue
from rl.models.build import ENGINES
from rl.models.engine_config import EngineConfig
from rl.models.layout import Layout
from rl.types import OptimParams, Sample
from tests.numeric import assert_close_as, exact_twin
from tests.tiny import write_config, write_model

ROOT = Path(__file__).parent.parent.parent
LAYOUTS = {"FSDP2": Layout(shard=2), "TP2": Layout(tensor_parallel=2), "CP2": Layout(context_parallel=2)}


def samples():
    rng = np.random.default_rng(0)
    made = []
    for n in (5, 9, 17, 3):
        mask = np.arange(n) > 1
        returns = rng.normal(0, 1, n).astype(np.float32)
        zeros = np.zeros(n, np.float32)
        columns = {"returns": returns, "values": zeros}
        made.append(Sample(rng.integers(0, 128, n), mask, zeros, zeros, mask.astype(np.float32), columns))
    return made


def learn(engine, num_steps=3):
    """Losses of so many steps, and the values after them."""
    shape = {"num_ranks": engine.config.layout.data_parallel, "multiple_of": engine.config.row_multiple}
    batch = pack(samples(), max_tokens=64, **shape)
    losses = []
    for _ in range(num_steps):
        metrics = engine.forward_backward(batch, ClippedValue(clip=0.0))
        engine.optim_step(OptimParams(lr=1e-2, grad_scale=1 / batch.num_target_tokens))
        losses.append(metrics["loss:sum"])
    return losses, engine.forward(batch)


def gradient_by_hand(model):
    total = torch.zeros(64, dtype=model.dtype)
    for sample in samples():
        with torch.no_grad():
            hidden = model.model(torch.from_numpy(sample.tokens)[None]).last_hidden_state[0]
        for t in np.flatnonzero(sample.target_mask):
            total -= float(sample.loss_inputs["returns"][t]) * hidden[t - 1]
    return total


@pytest.mark.parametrize("kind", ["titan", "hf"])
@pytest.mark.parametrize("tied", [True, False])
def test_values_start_at_zero_and_learn_the_returns_by_the_gradient_of_transformers_hidden_states(
    tmp_path, kind, tied
):
    model = write_model(tmp_path, tie_word_embeddings=tied)
    engine = ENGINES[kind](tmp_path, EngineConfig(head="value"))
    batch = pack(samples())
    assert all((v == 0).all() for v in engine.forward(batch).values())
    engine.forward_backward(batch, ClippedValue(clip=0.0))
    # The head's gradient by hand: sum over tokens of (0 - return) * hidden state of the token before.
    reference, exact = (gradient_by_hand(m) for m in (model, copy.deepcopy(model).double()))
    head = next(p for n, p in engine._tensors.items() if n == "value_head.weight")
    gradient = head.grad.full_tensor() if hasattr(head.grad, "full_tensor") else head.grad
    assert_close_as(reference, gradient[0], exact)
    engine.optim_step(OptimParams(lr=0.0))
    losses, _ = learn(engine, num_steps=30)
    assert losses[-1] < 0.1 * losses[0]  # holds: meaning, it learns


@pytest.mark.slow
def test_every_layout_learns_what_one_process_learns(tmp_path):
    write_config(tmp_path / "model")
    engine = ENGINES["titan"](tmp_path / "model", EngineConfig(head="value", seed=3))
    with exact_twin(engine, tmp_path / "exact") as twin:
        exact_losses, exact_values = learn(twin)
    losses, values = learn(engine)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.models.test_value_head", str(tmp_path / "model")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, (got_losses, got_values) in json.loads(done.stdout.splitlines()[-1]).items():
        assert_close_as(losses, got_losses, exact_losses, f"losses, {name}")
        assert_close_as(values, {int(i): np.array(row) for i, row in got_values.items()}, exact_values, name)


def test_a_critic_takes_over_a_policys_weights_and_starts_at_zero_again(tmp_path):
    write_config(tmp_path / "model")
    policy = ENGINES["titan"](tmp_path / "model", EngineConfig(seed=5))
    policy.save_hf(tmp_path / "hf")
    critic = ENGINES["titan"](tmp_path / "model", EngineConfig(head="value", seed=3))
    learn(critic)
    critic.load_weights(tmp_path / "hf")
    fresh = ENGINES["titan"](tmp_path / "hf", EngineConfig(head="value"))
    assert learn(critic, 0)[1].keys() == learn(fresh, 0)[1].keys()
    for name, tensor in critic._tensors.items():
        assert torch.equal(tensor, fresh._tensors[name]), name
    assert all((v == 0).all() for v in learn(critic, 0)[1].values())


def worker() -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    results = {}
    for name, layout in LAYOUTS.items():
        engine = ENGINES["titan"](sys.argv[1], EngineConfig(layout=layout, head="value", seed=3))
        losses, values = learn(engine)
        parts = [None] * 2
        dist.all_gather_object(parts, (losses, {i: v.tolist() for i, v in values.items()}))
        parts = parts[:: layout.procs_per_row]
        summed = [sum(p[0][s] for p in parts) for s in range(3)]
        results[name] = (summed, {i: v for p in parts for i, v in p[1].items()})
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    worker()
