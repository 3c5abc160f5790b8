"""The engine's contract: gradients accumulate as sums, the denominator comes once, what cannot be right is refused."""

import numpy as np
import pytest
import torch

from rl.batching import pack, supervised_sample
from rl.errors import RunError
from rl.loss.policy import Clip, CrossEntropy
from rl.models.engine import EngineConfig
from rl.models.titan import TitanEngine
from rl.types import OptimParams, Sample
from tests.tiny import write_config


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("model"))


def samples(count=6, seed=0):
    rng = np.random.default_rng(seed)
    return [supervised_sample(rng.integers(0, 128, 3), rng.integers(0, 128, rng.integers(1, 30))) for _ in range(count)]


def gradients(engine):
    return [p.grad.full_tensor().clone() for p in engine._model.parameters()]


def worst(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_several_calls_equal_one_call_on_the_joined_batch(model_dir, dtype, tolerance):
    rows, scale = samples(), 1 / 100
    one, many = (TitanEngine(model_dir, EngineConfig(seed=1, dtype=dtype)) for _ in range(2))
    one.forward_backward(pack(rows), CrossEntropy())
    for part in (rows[:1], rows[1:4], rows[4:]):
        many.forward_backward(pack(part), CrossEntropy())
    largest = max(g.abs().max().item() for g in gradients(one))
    assert worst(gradients(one), gradients(many)) < tolerance * largest
    norms = [engine.optim_step(OptimParams(1e-3, scale))["grad_norm"] for engine in (one, many)]
    assert norms[0] == pytest.approx(norms[1], rel=tolerance)


def test_chunking_the_head_changes_nothing(model_dir, monkeypatch):
    from rl.models import decoder

    whole, chunked = (TitanEngine(model_dir, EngineConfig(seed=1)) for _ in range(2))
    whole_metrics = whole.forward_backward(pack(samples()), CrossEntropy())
    monkeypatch.setattr(decoder, "_CHUNK_ELEMENTS", 128 * 7)
    chunked_metrics = chunked.forward_backward(pack(samples()), CrossEntropy())
    assert chunked_metrics == pytest.approx(whole_metrics, abs=1e-4)
    assert worst(gradients(whole), gradients(chunked)) < 1e-5


def test_bf16_computes_near_fp32_and_keeps_fp32_master_weights(model_dir):
    fp32, bf16 = (TitanEngine(model_dir, EngineConfig(seed=1, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    exact, rounded = fp32.forward(pack(samples())), bf16.forward(pack(samples()))
    gap = np.concatenate([np.abs(exact[i] - rounded[i]) for i in exact])
    assert 0 < gap.mean() < 0.03
    assert all(p.dtype == torch.float32 for p in bf16._model.parameters())
    bf16.forward_backward(pack(samples()), CrossEntropy())
    assert all(p.grad.dtype == torch.float32 for p in bf16._model.parameters())
    assert all(shard.data.dtype == torch.bfloat16 for shard in bf16.export())


def test_scoring_alone_leaves_the_weights_exportable(model_dir):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    before = {s.name: s.data.clone() for s in engine.export()}
    engine.forward(pack(samples()))
    after = {s.name: s.data for s in engine.export()}
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def test_grad_scale_clipping_and_lr_act(model_dir):
    def step(**changes):
        engine = TitanEngine(model_dir, EngineConfig(seed=1))
        engine.forward_backward(pack(samples()), CrossEntropy())
        before = [p.full_tensor().clone() for p in engine._model.parameters()]
        norm = engine.optim_step(OptimParams(**({"lr": 1e-3} | changes)))["grad_norm"]
        return norm, [p.full_tensor() - b for p, b in zip(engine._model.parameters(), before, strict=True)]

    norm, update = step()
    assert step(grad_scale=0.5)[0] == pytest.approx(norm / 2, rel=1e-5)
    assert worst(step(lr=0.0)[1], [torch.zeros_like(u) for u in update]) == 0
    # Adam's first step is sign-like: its size follows lr, and eps once clipping has made the gradient small against it.
    assert worst(step(lr=2e-3)[1], [2 * u for u in update]) < 1e-6
    clipped, unclipped = (step(max_grad_norm=m, eps=1e-2)[1] for m in (1e-3, 0.0))
    assert max(u.abs().max() for u in clipped) < 0.1 * max(u.abs().max() for u in unclipped)
    assert worst(step(weight_decay=0.5)[1], update) > 1e-6


def test_what_is_not_finite_is_refused_before_it_reaches_the_weights(model_dir):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    before = [p.full_tensor().clone() for p in engine._model.parameters()]
    n = 5
    mask = np.arange(n) > 0
    bad = Sample(np.arange(n), mask, np.zeros(n, np.float32), np.full(n, np.nan, np.float32), mask.astype(np.float32))
    with pytest.raises(RunError, match="the loss is nan"):
        engine.forward_backward(pack([bad]), Clip())
    engine.forward_backward(pack(samples()), CrossEntropy())
    with pytest.raises(RunError, match="gradient norm is .*; the step was not applied"):
        engine.optim_step(OptimParams(1e-3, grad_scale=float("inf")))
    assert worst(before, [p.full_tensor() for p in engine._model.parameters()]) == 0
    with pytest.raises(RunError, match="optim_step without a gradient"):
        engine.optim_step(OptimParams(1e-3))


def test_an_empty_batch_and_a_single_token_work(model_dir):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    metrics = engine.forward_backward(pack([]), Clip())
    assert metrics["tokens:sum"] == 0 and metrics["loss:sum"] == 0
    engine.forward_backward(pack([supervised_sample([5], [6])]), CrossEntropy())
    assert engine.optim_step(OptimParams(1e-3))["grad_norm"] > 0


def test_a_checkpoint_is_complete_or_not_there(model_dir, tmp_path, monkeypatch):
    engine = TitanEngine(model_dir, EngineConfig(seed=1))
    with pytest.raises(RunError, match="is not a complete checkpoint"):
        engine.load_checkpoint(tmp_path / "step-1")
    from rl.models import engine as module

    def crash(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module.dcp, "save", crash)
        with pytest.raises(OSError):
            engine.save_checkpoint(tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()
    engine.save_checkpoint(tmp_path / "step-1")
    other = TitanEngine(model_dir, EngineConfig(seed=2))
    other.load_checkpoint(tmp_path / "step-1")
    batch = pack(samples())
    assert all(np.array_equal(a, b) for a, b in zip(engine.forward(batch).values(), other.forward(batch).values(), strict=True))
