"""The engines' contract: gradients accumulate as sums, the denominator comes once, bad input is refused."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rl.batching import pack, supervised_sample
from rl.errors import ConfigError, NotFinite, RunError
from rl.loss.base import LossOutput
from rl.loss.clip import Clip
from rl.loss.cross_entropy import CrossEntropy
from rl.models import target_logprobs
from rl.models.build import ENGINES
from rl.models.engine_config import EngineConfig
from rl.models.hf import weight_files
from rl.models.layout import Layout
from rl.models.learner import local
from rl.models.titan import TitanEngine
from rl.types import LoRA, OptimParams, Sample
from tests.numeric import assert_close_as, error_of, exact_twin, limit_by
from tests.tiny import write_config


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=ENGINES)
def make(request, model_dir):
    """Builds one kind of engine with random weights."""

    def make(**settings):
        return ENGINES[request.param](model_dir, EngineConfig(**({"seed": 1} | settings)))

    return make


def samples(count=6, seed=0):
    rng = np.random.default_rng(seed)
    draw = rng.integers
    return [supervised_sample(draw(0, 128, 3), draw(0, 128, draw(1, 30))) for _ in range(count)]


def weights(engine):
    return {s.name: s.data.float().clone() for s in engine.export()}


def gradients(engine):
    return {n: p.grad.full_tensor().clone() for n, p in engine._tensors.items()}


def worst(a, b):
    assert a.keys() == b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


# Three equal micro-batches, and three of very different size.
PARTS = {"equal": ((0, 2), (2, 4), (4, 6)), "unequal": ((0, 1), (1, 5), (5, 6))}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_calls_equal_one_call_on_the_joined_batch(make, tmp_path, dtype, parts):
    """As near to the exact gradient as one call is in the same dtype."""
    rows = samples()
    if parts == "equal":
        rows = [supervised_sample([5, i], np.arange(i, i + 20)) for i in range(6)]
    one, many = (make(dtype=dtype) for _ in range(2))
    one.forward_backward(pack(rows), CrossEntropy())
    for first, last in PARTS[parts]:
        many.forward_backward(pack(rows[first:last]), CrossEntropy())
    with exact_twin(make(), tmp_path) as exact:
        exact.forward_backward(pack(rows), CrossEntropy())
    assert_close_as(gradients(one), gradients(many), gradients(exact))
    # bf16 was computed in: it rounds by up to 2^-9, and fp32 is over a thousand times finer.
    own = worst(gradients(one), gradients(exact)) / max(g.abs().max() for g in gradients(exact).values())
    assert (own > 1e-4) == (dtype == "bfloat16")  # holds: meaning, the dtypes round a thousandfold apart
    apart = sum((gradients(one)[n] - g).square().sum().item() for n, g in gradients(many).items()) ** 0.5
    norms = [engine.optim_step(OptimParams(1e-3, 1 / 100))["grad_norm"] for engine in (one, many)]
    # The triangle inequality, and what fp32 rounds of a norm.
    assert abs(norms[0] - norms[1]) <= apart / 100 + 1e-6 * norms[0]  # holds: reference


def test_chunking_the_head_changes_nothing(make, tmp_path, monkeypatch):
    whole, chunked = make(), make()
    whole_metrics = whole.forward_backward(pack(samples()), CrossEntropy())
    logprobs = make().forward(pack(samples()))
    with exact_twin(make(), tmp_path) as exact:
        exact_logprobs = exact.forward(pack(samples()))
        exact.forward_backward(pack(samples()), CrossEntropy())
    monkeypatch.setattr(target_logprobs, "CHUNK_ELEMENTS", 128 * 7)
    chunked_metrics = chunked.forward_backward(pack(samples()), CrossEntropy())
    # Metrics are sums over the tokens.
    allowed = pack(samples()).num_target_tokens * limit_by(logprobs, exact_logprobs)
    assert chunked_metrics == pytest.approx(whole_metrics, abs=allowed)  # holds: reference
    assert_close_as(gradients(whole), gradients(chunked), gradients(exact))


def test_only_logits_that_predict_targets_are_computed(make, monkeypatch):
    seen = []
    original = target_logprobs.logprobs_and_entropy

    def spy(logits, targets):
        seen.append(logits.shape)
        return original(logits, targets)

    monkeypatch.setattr(target_logprobs, "logprobs_and_entropy", spy)
    row = supervised_sample(np.arange(60), np.arange(4))
    make().forward_backward(pack([row]), CrossEntropy())
    assert seen == [(4, 128)]


def test_bf16_computes_near_fp32_and_keeps_fp32_master_weights(make, tmp_path):
    """In the mean as near to the exact logprobs as transformers is in bf16."""
    bf16, rows = make(dtype="bfloat16"), samples()
    with exact_twin(make(), tmp_path) as twin:
        exact = twin.forward(pack(rows))
    transformers_bf16 = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    reference = {i: logprobs_by_transformers(transformers_bf16, row) for i, row in enumerate(rows)}
    rounded = bf16.forward(pack(rows))
    assert_close_as(reference, rounded, exact, mean=True)
    assert error_of(rounded, exact) > 1e-4  # holds: meaning, fp32 is a hundred times nearer
    assert all(p.dtype == torch.float32 for p in bf16._model.parameters())
    bf16.forward_backward(pack(samples()), CrossEntropy())
    assert all(p.grad.dtype == torch.float32 for p in bf16._model.parameters())
    assert all(shard.dtype == torch.bfloat16 for shard in bf16.export())


@torch.no_grad()
def logprobs_by_transformers(model, sample):
    tokens = torch.from_numpy(sample.tokens)
    logprobs = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(sample.target_mask[1:])]


def test_float8_changes_the_result_a_little(model_dir):
    fp32, float8 = (TitanEngine(model_dir, EngineConfig(seed=1, float8=on)) for on in (False, True))
    exact, rounded = (engine.forward(pack(samples(), multiple_of=16)) for engine in (fp32, float8))
    gap = np.concatenate([np.abs(exact[i] - rounded[i]) for i in exact])
    with pytest.raises(RunError, match="is not a multiple of 16; pack with multiple_of=config.row_multiple"):
        float8.forward(pack([supervised_sample([1], [2])]))
    # holds: meaning, e4m3 rounds by 2^-4; every variant measured is within 1% of 0.083
    assert 1e-4 < gap.mean() < 0.2
    losses = []
    for _ in range(20):
        metrics = float8.forward_backward(pack(samples(), multiple_of=16), CrossEntropy())
        float8.optim_step(OptimParams(3e-3, 1 / metrics["tokens:sum"]))
        losses.append(metrics["loss:sum"])
    assert losses[-1] < 0.3 * losses[0]  # holds: meaning, it learns


def test_all_layers_share_one_table_of_positions(model_dir):
    model = TitanEngine(model_dir, EngineConfig(seed=1))._model
    tables = [t for name, t in model.named_buffers(remove_duplicate=False) if name.endswith("rope.cache")]
    assert len(tables) == len(model.layers) > 1 and all(table is tables[0] for table in tables)


def test_forward_alone_leaves_the_weights_exportable(make):
    engine = make()
    before = weights(engine)
    engine.forward(pack(samples()))
    assert worst(before, weights(engine)) == 0


def test_grad_scale_clipping_and_every_other_parameter_act(make):
    def step(**changes):
        engine = make()
        engine.forward_backward(pack(samples()), CrossEntropy())
        before = weights(engine)
        norm = engine.optim_step(OptimParams(**({"lr": 1e-3} | changes)))["grad_norm"]
        return norm, {n: w - before[n] for n, w in weights(engine).items()}

    norm, update = step()
    assert step(grad_scale=0.5)[0] == pytest.approx(norm / 2, rel=1e-5)  # holds: exact
    assert worst(step(lr=0.0)[1], {n: torch.zeros_like(u) for n, u in update.items()}) == 0
    # Adam's first step is sign-like: its size follows lr, and eps once clipping has made the gradient small
    # against it.
    rounding = torch.finfo(torch.float32).eps * max(w.abs().max().item() for w in weights(make()).values())
    # Either update is the difference of two rounded weights.
    assert worst(step(lr=2e-3)[1], {n: 2 * u for n, u in update.items()}) < 4 * rounding  # holds: reference
    clipped, unclipped = (step(max_grad_norm=m, eps=1e-2)[1] for m in (1e-3, 0.0))
    # holds: meaning, clipping makes the update small
    assert max(u.abs().max() for u in clipped.values()) < 0.1 * max(u.abs().max() for u in unclipped.values())
    assert worst(step(weight_decay=0.5)[1], update) > 1e-6  # holds: meaning, the decay of one step is 5e-4

    def second_step(betas):
        engine = make()
        for seed in (0, 1):
            engine.forward_backward(pack(samples(seed=seed)), CrossEntropy())
            engine.optim_step(OptimParams(1e-3, betas=betas))
        return weights(engine)

    # holds: meaning, the setting moves weights by over 1e-4
    assert worst(second_step((0.9, 0.95)), second_step((0.5, 0.95))) > 1e-5
    # holds: meaning, the setting moves weights by over 1e-4
    assert worst(second_step((0.9, 0.95)), second_step((0.9, 0.5))) > 1e-5


def test_what_is_not_finite_is_refused_before_it_reaches_the_weights(make):
    engine = make()
    before = weights(engine)
    n = 5
    mask = np.arange(n) > 0
    zeros, advantages = np.zeros(n, np.float32), np.full(n, np.nan, np.float32)
    bad = Sample(np.arange(n), mask, zeros, advantages, mask.astype(np.float32))
    # Two micro-batches, of which the second is at fault: the first leaves no half of a gradient behind.
    good = Sample(np.arange(9), np.arange(9) > 0, *(np.ones(9, np.float32),) * 3)
    batch = pack([good, bad], max_tokens=9)
    assert len(batch.ranks[0]) == 2
    with pytest.raises(RunError, match="the loss is nan"):
        engine.forward_backward(batch, Clip())
    with pytest.raises(RunError, match="optim_step without a gradient"):
        engine.optim_step(OptimParams(1e-3))
    engine.forward_backward(pack(samples()), CrossEntropy())
    with pytest.raises(RunError, match="gradient norm is .*; the step was not applied"):
        engine.optim_step(OptimParams(1e-3, grad_scale=float("inf")))
    assert worst(before, weights(engine)) == 0
    # And nothing else is left of it: the next steps are those of an engine that never met it.
    clean = make()
    for e in (engine, clean):
        for _ in range(2):
            e.forward_backward(pack(samples()), CrossEntropy())
            e.optim_step(OptimParams(1e-2))
    assert worst(weights(engine), weights(clean)) == 0


def test_weights_that_an_update_makes_infinite_are_named(make):
    engine = make()
    engine.forward_backward(pack(samples()), CrossEntropy())
    with pytest.raises(NotFinite, match=r"weights are not finite after an update with lr=3e\+38") as error:
        engine.optim_step(OptimParams(3e38, weight_decay=1.0))
    assert error.value.metric == "weights"


def test_an_empty_batch_a_single_token_and_a_row_as_long_as_the_limit_work_and_a_longer_one_is_named(make):
    engine = make(max_seq_len=64)
    metrics = engine.forward_backward(pack([]), Clip())
    assert metrics["tokens:sum"] == 0 and metrics["loss:sum"] == 0
    engine.forward_backward(pack([supervised_sample([5], [6])]), CrossEntropy())
    assert engine.optim_step(OptimParams(1e-3))["grad_norm"] > 0  # holds: exact
    one_token = supervised_sample([], [5])  # nothing before it to predict it from
    assert engine.forward_backward(pack([one_token]), CrossEntropy())["tokens:sum"] == 0
    assert len(engine.forward(pack([supervised_sample([1], np.arange(63))]))[0]) == 63
    with pytest.raises(RunError, match="a sequence of 65 tokens exceeds the 64 positions"):
        engine.forward(pack([supervised_sample([1], np.arange(64))]))


def test_a_loss_is_not_asked_about_filler(make):
    """Of which a rank has as many rows as others have more sequences; the largest of no values raises."""

    def loss(logprobs, inputs):
        return LossOutput(-logprobs.sum(), {"least:max": (-logprobs).detach().max()})

    engine = make()
    assert "least:max" not in engine.forward_backward(pack([]), loss)
    assert engine.forward_backward(pack([supervised_sample([5], [6])]), loss)["least:max"] > 0  # holds: exact
    assert engine.optim_step(OptimParams(1e-3))["grad_norm"] > 0  # holds: exact


@pytest.mark.parametrize("when", ["after a step", "before one", "at first"])
def test_an_engine_that_was_suspended_goes_on_as_if_it_had_not_been(make, when, tmp_path):
    stayed, left = make(), make()

    def learn(engine):
        engine.forward_backward(pack(samples()), CrossEntropy())

    for engine in (stayed, left):
        if when != "at first":
            learn(engine)
            engine.optim_step(OptimParams(1e-3))
        if when == "before one":
            learn(engine)
    held = [local(tensor).untyped_storage() for tensor in left._held()]
    sizes = [storage.nbytes() for storage in held]
    before = weights(left)
    for _ in range(2):  # the second time it is suspended, or there, already
        left.suspend(tmp_path)
        assert not any(storage.nbytes() for storage in held) and not list(tmp_path.iterdir())
    for verb in (
        lambda: left.forward(pack(samples())), lambda: learn(left), lambda: left.optim_step(OptimParams(1e-3)),
        lambda: next(left.export()), lambda: left.save_hf(tmp_path / "hf"), lambda: left.save(tmp_path / "step-1"),
        lambda: left.load(tmp_path / "step-1"), lambda: left.load_weights(tmp_path), lambda: left.logits(pack(samples())),
        lambda: left.reset_optimizer(), lambda: left.save_adapter("a", tmp_path / "a"), lambda: left.adapters.add("a", LoRA(2)),
        lambda: left.adapters.copy("a", "b"), lambda: left.adapters.learner("a"),
    ):  # fmt: skip
        with pytest.raises(RunError, match=r"the engine is suspended; resume\(\) it first"):
            verb()
    for _ in range(2):
        left.resume()
        assert [storage.nbytes() for storage in held] == sizes
    assert worst(before, weights(left)) == 0
    for engine in (stayed, left):
        if when != "before one":
            learn(engine)
        engine.optim_step(OptimParams(1e-3))
    assert worst(weights(stayed), weights(left)) == 0
    assert all(
        torch.equal(value, stayed._base.state()[name][key])
        for name, state in left._base.state().items()
        for key, value in state.items()
    )


def test_an_engine_for_which_there_is_no_room_to_leave_stays(make, tmp_path, monkeypatch):
    engine = make()
    before = weights(engine)

    def full(stash, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl.models.suspension._File.put", full)
    with pytest.raises(RunError, match="there is no room in .*No space left on device.*; make room"):
        engine.suspend(tmp_path)
    engine.forward(pack(samples()))
    assert worst(before, weights(engine)) == 0


def test_a_layout_or_a_setting_that_cannot_be_is_named(model_dir):
    for kind in ENGINES.values():
        with pytest.raises(ConfigError, match="needs 2 processes but 1 run"):
            kind(model_dir, EngineConfig(layout=Layout(shard=2)))
        if not torch.accelerator.is_available():
            with pytest.raises(ConfigError, match="compile=True needs a GPU|HFEngine has no compile"):
                kind(model_dir, EngineConfig(compile=True))
    with pytest.raises(ConfigError, match="HFEngine has no float8"):
        ENGINES["hf"](model_dir, EngineConfig(float8=True))


def test_the_logprobs_of_a_gradient_are_those_of_a_forward_pass(make):
    engine = make()
    batch, found = pack(samples()), {}
    expected = engine.forward(batch)
    engine.forward_backward(batch, CrossEntropy(), taken=found)
    assert found.keys() == expected.keys()
    # holds: exact, the same kernels on the same rows
    assert all(np.abs(found[i] - expected[i]).max() < 1e-5 for i in expected)


def test_labels_are_scored_in_the_place_of_the_tokens_that_follow(make):
    """Three labels a position, as samples with equal tokens: the logits' own logprobs, each computed once."""
    engine = make()
    rng = np.random.default_rng(4)
    plain = samples(1)[0]
    labels = rng.integers(0, 100, (3, len(plain)))
    labelled = [replace(plain, labels=row) for row in labels]
    batch = pack(labelled, **engine.packing)
    if engine.packing["share_prefixes"]:
        assert len(batch.ranks[0][0].tokens) < 2 * len(plain)
    (logits,) = engine.logits(pack([plain]))
    every = logits.log_softmax(-1)
    for i, logprobs in engine.forward(batch).items():
        wanted = every.gather(1, torch.tensor(labels[i][plain.target_mask])[:, None])[:, 0]
        # holds: exact, log-softmax of the same logits in another order
        assert (torch.from_numpy(logprobs) - wanted).abs().max() < 1e-4


def test_what_a_group_is_scored_on_together_meets_the_vocabulary_once(make, tmp_path, monkeypatch):
    """A prompt that is taught beside its answers, as Tinker's clients send it: outputs and gradients are the same."""
    rng, counted = np.random.default_rng(5), []
    prompt = rng.integers(0, 100, 20)
    group = [supervised_sample(prompt[:1], [*prompt[1:], *rng.integers(0, 100, 4)]) for _ in range(6)]
    engine = make()
    if not engine.packing["share_prefixes"]:
        pytest.skip("this engine's rows share nothing")
    plain = pack(group)
    expected = engine.forward(plain)
    engine.forward_backward(plain, CrossEntropy())
    gradient = gradients(engine)
    engine._learner(None).clear()
    with exact_twin(engine, tmp_path) as twin:
        exact = twin.forward(plain)
        twin.forward_backward(plain, CrossEntropy())
    run = engine._run

    def count(micro, with_targets):
        counted.append(len(micro.targets))
        return run(micro, with_targets)

    monkeypatch.setattr(engine, "_run", count)
    shared = pack(group, **engine.packing)
    got = engine.forward(shared)
    engine.forward_backward(shared, CrossEntropy())
    assert counted == [19 + 6 * 4] * 2
    assert_close_as(expected, got, exact, "logprobs")
    assert_close_as(gradient, gradients(engine), gradients(twin), "gradients")


@pytest.mark.parametrize("fault", ["lacks the last", "has another shape"])
def test_a_directory_that_is_not_of_this_model_is_taken_over_in_no_part(make, tmp_path, fault):
    engine = make()
    make(seed=2).save_hf(tmp_path / "hf")
    (file,) = weight_files(tmp_path / "hf")
    tensors = load_file(file)
    last = engine._name([name for name, _ in engine._model.named_parameters()][-1])
    tensor = tensors.pop(last)
    if fault == "has another shape":
        tensors[last] = tensor[1:].clone()
    save_file(tensors, file)
    before = weights(engine)
    with pytest.raises((ConfigError, RunError), match=re.escape(last)):
        engine.load_weights(tmp_path / "hf")
    assert worst(before, weights(engine)) == 0


def test_an_optimizer_that_was_reset_goes_on_as_a_new_one(make):
    """Neither moments nor a gradient are left of what it did before, here without moving the weights."""
    used, new = make(), make()
    used.forward_backward(pack(samples(seed=1)), CrossEntropy())
    used.optim_step(OptimParams(0.0))
    used.forward_backward(pack(samples(seed=1)), CrossEntropy())
    used.reset_optimizer()
    with pytest.raises(RunError, match="optim_step without a gradient"):
        used.optim_step(OptimParams(1e-3))
    for engine in (used, new):
        engine.forward_backward(pack(samples()), CrossEntropy())
        engine.optim_step(OptimParams(1e-3))
    assert worst(weights(used), weights(new)) == 0
