"""Rows in which equal leading tokens stand once, against the same sequences side by side."""

import numpy as np
import pytest
import torch

from rl.batching import pack
from rl.errors import RunError
from rl.loss.clip import Clip
from rl.micro_batch import Batch
from rl.models.engine_config import EngineConfig
from rl.models.hf_engine import HFEngine
from rl.models.learner import local
from rl.models.packing import packing
from rl.models.titan import TitanEngine
from rl.types import OptimParams, Sample
from tests.numeric import assert_close_as, exact_twin
from tests.tiny import write_model


def sample(tokens, first_target, rng, name=""):
    """From its token `first_target` on it was sampled; some in between were given, as a tool's answer is."""
    size = len(tokens)
    mask = (np.arange(size) >= first_target) & (rng.random(size) < 0.8)
    on = lambda values: np.where(mask, values, 0).astype(np.float32)  # noqa: E731
    noise = rng.normal(-3, 0.5, size), rng.normal(0, 1, size)
    return Sample(np.asarray(tokens, np.int64), mask, on(noise[0]), on(noise[1]), on(1.0), id=name)


def groups(rng):
    """Prompts with a common beginning, each with answers that share tokens; an agent's turns; duplicates."""
    made, system = [], rng.integers(0, 128, 9).tolist()
    for _ in range(4):
        prompt = system + rng.integers(0, 128, rng.integers(3, 40)).tolist()
        for _ in range(5):
            made.append(sample(prompt + rng.integers(0, 3, rng.integers(1, 30)).tolist(), len(prompt), rng))
    history = rng.integers(0, 128, 20).tolist()
    for _ in range(4):  # each turn goes on after the one before
        history = history + rng.integers(0, 128, 7).tolist()
        made.append(sample(history, len(history) - 7, rng))
    twice = rng.integers(0, 128, 12).tolist()
    made += [sample(twice, 6, rng), sample(twice, 6, rng), sample([5], 0, rng), sample([5, 6], 0, rng)]
    return [made[i] for i in rng.permutation(len(made))]


def num_tokens(batch: Batch) -> int:
    return sum(len(micro.tokens) for rank in batch.ranks for micro in rank)


@pytest.mark.parametrize("seed", range(20))
def test_a_row_of_trees_holds_every_sample_whole(seed):
    rng = np.random.default_rng(seed)
    samples = groups(rng)
    batch = pack(samples, num_ranks=2, max_tokens=300, multiple_of=4, share_prefixes=True)
    assert num_tokens(batch) < 0.7 * sum(map(len, samples))  # holds: exact, token counts
    seen = []
    for micro in (m for rank in batch.ranks for m in rank):
        assert len(micro.tokens) <= 300 and len(micro.tokens) % 4 == 0
        path: list[int] = []
        paths = []  # of each token: its ancestors and itself
        for place, position in enumerate(micro.positions):
            assert position <= len(path)
            path = [*path[:position], place]
            paths.append(path)
        for i in np.unique(micro.sample_ids):
            mine = micro.sample_ids == i
            last = paths[micro.predictors[mine][-1]]
            targets = np.flatnonzero(samples[i].target_mask)
            assert micro.tokens[last].tolist() == samples[i].tokens[: len(last)].tolist()
            assert micro.targets[mine].tolist() == samples[i].tokens[targets].tolist()
            assert micro.predictors[mine].tolist() == [last[t - 1] for t in targets]
            assert micro.advantages[mine].tolist() == samples[i].advantages[targets].tolist()
            seen.append(int(i))
    assert sorted(seen) == [i for i, s in enumerate(samples) if s.target_mask.any()]


@pytest.mark.parametrize("model_type", ["qwen3", "llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", ["tokens", "value"])
def test_outputs_and_gradients_are_those_of_the_sequences_side_by_side(tmp_path, model_type, head):
    write_model(tmp_path, model_type)
    samples = groups(np.random.default_rng(0))

    def compute(engine, share):
        """Its micro-batches' tokens, outputs, metrics and gradients."""
        if head == "value":
            weight = local(engine._model.lm_head.weight.data)
            weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
        batch = pack(samples, max_tokens=500, share_prefixes=share)
        outputs = engine.forward(batch)
        measured = engine.forward_backward(batch, _squared if head == "value" else Clip())
        gradients = {name: p.grad.clone() for name, p in engine._tensors.items() if p.grad is not None}
        return num_tokens(batch), outputs, measured, gradients

    plain, shared = (
        TitanEngine(tmp_path, EngineConfig(share_prefixes=on, head=head)) for on in (False, True)
    )
    many, reference, before, expected = compute(plain, False)
    few, outputs, after, got = compute(shared, True)
    with exact_twin(plain, tmp_path / "exact") as twin:
        _, exact, _, exact_gradients = compute(twin, False)
    shared.optim_step(OptimParams(lr=1e-3))
    assert few < 0.7 * many  # holds: exact, token counts
    assert_close_as(reference, outputs, exact, "outputs")
    # holds: exact, sums over 400 tokens of numbers compared below
    assert before == pytest.approx(after, rel=1e-4, abs=1e-4)
    assert_close_as(expected, got, exact_gradients, "gradients")


def _squared(values, inputs):
    from rl.loss.base import LossOutput

    return LossOutput(((values - inputs.advantages).square() * inputs.weights).sum(), {})


def test_pairs_stay_in_one_micro_batch_and_share_their_prompt():
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(10):
        prompt = rng.integers(0, 128, 30).tolist()
        samples += [sample(prompt + rng.integers(0, 128, 5).tolist(), 30, rng) for _ in range(2)]
    batch = pack(samples, max_tokens=100, samples_per_unit=2, share_prefixes=True)
    assert 10 * (30 + 2) < num_tokens(batch) <= 10 * (30 + 5 + 5)
    for micro in batch.ranks[0]:
        ids = set(micro.sample_ids.tolist())
        assert all(i ^ 1 in ids for i in ids)


def test_ranks_stay_balanced():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 128, rng.integers(10, 60)).tolist() for _ in range(32)]
    samples = [
        sample(p + rng.integers(0, 128, rng.integers(1, 30)).tolist(), len(p), rng)
        for p in prompts
        for _ in range(8)
    ]
    batch = pack(samples, num_ranks=4, max_tokens=2048, share_prefixes=True)
    loads = [sum(len(m.tokens) for m in rank) for rank in batch.ranks]
    assert max(loads) <= 1.1 * sum(loads) / 4  # holds: exact, token counts


@pytest.mark.parametrize(
    "model_type, shares", [("llama", True), ("gemma3_text", True), ("gemma2", False), ("mamba", False)]
)
def test_hf_engine_shares_prefixes_where_its_check_shows_that_it_can(tmp_path, model_type, shares):
    changes = {"sliding_window": 16} if model_type.startswith("gemma") else {}
    write_model(tmp_path, model_type, **changes)
    samples = groups(np.random.default_rng(0))
    plain = HFEngine(tmp_path, EngineConfig(share_prefixes=False))
    trees = HFEngine(tmp_path)
    assert trees.packing["share_prefixes"] == shares and not plain.packing["share_prefixes"]
    assert not HFEngine(tmp_path, EngineConfig(dropout=True)).packing["share_prefixes"]
    outputs = [one.forward(pack(samples, max_tokens=500, **one.packing)) for one in (plain, trees)]
    with exact_twin(plain, tmp_path / "exact") as twin:
        assert_close_as(*outputs, twin.forward(pack(samples, max_tokens=500)))
    shared = pack(samples, max_tokens=500, share_prefixes=True)
    if not shares:
        with pytest.raises(RunError, match="which this engine does not compute; pack with"):
            trees.forward(shared)


def test_what_shares_next_to_nothing_is_packed_plainly():
    rng = np.random.default_rng(0)
    samples = [sample([7, *rng.integers(0, 128, 99)], 50, rng) for _ in range(20)]  # one token of 100
    batch = pack(samples, max_tokens=500, share_prefixes=True)
    assert batch.num_tokens == batch.num_unshared_tokens == 2000 and not batch.num_cuts


def test_a_tree_that_fits_into_no_row_is_cut_and_counted():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 128, 60).tolist()
    samples = [sample(prompt + rng.integers(0, 128, 20).tolist(), 60, rng) for _ in range(8)]
    whole = pack(samples, max_tokens=60 + 8 * 20, share_prefixes=True)
    cut = pack(samples, max_tokens=60 + 4 * 20, share_prefixes=True)
    assert (whole.num_cuts, whole.num_tokens, whole.num_unshared_tokens) == (0, 60 + 8 * 20, 8 * 80)
    assert cut.num_cuts == len(cut.ranks[0]) - 1 == 1
    assert cut.num_tokens == 2 * (60 + 4 * 20)
    assert cut.num_target_tokens == sum(s.target_mask.sum() for s in samples)


@pytest.mark.parametrize("name", ["hidden_size", "n_embd"])
def test_what_attention_costs_follows_from_the_models_width(name):
    """A token that sees 6 D others costs as much in attention as in the layers' weights."""
    for config in ({name: 64}, {"text_config": {name: 64}}):
        cost = packing(EngineConfig(), config, True)["attention_cost"]
        assert cost * 6 * 64 == pytest.approx(1.0)  # holds: exact


def test_micro_batches_are_balanced_by_what_attention_costs():
    """One sequence of 400 tokens costs as much as eight of 100, if a look costs 1/100."""
    rng = np.random.default_rng(0)
    samples = [sample(rng.integers(0, 128, n), n // 2, rng) for n in (400, *[100] * 8)]
    by_cost, by_tokens = (
        pack(samples, num_ranks=2, max_tokens=1000, attention_cost=cost) for cost in (0.01, 0.0)
    )
    assert sorted(sum(len(m.tokens) for m in rank) for rank in by_cost.ranks) == [400, 800]
    assert sorted(sum(len(m.tokens) for m in rank) for rank in by_tokens.ranks) == [600, 600]
