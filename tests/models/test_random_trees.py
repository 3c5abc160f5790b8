"""Random prefix trees against the same sequences side by side: outputs, losses and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl import batching
from rl.batching import pack, supervised_sample
from rl.loss.clip import Clip
from rl.models.engine_config import EngineConfig
from rl.models.hf_engine import HFEngine
from rl.models.learner import local
from rl.models.titan import TitanEngine
from rl.types import Sample
from tests.numeric import assert_close_as, error_of, exact_twin, float64, limit_by
from tests.tiny import write_model

# Runs of tokens by which a tree grows: one that is empty makes a sample equal to, or a prefix of, another.
runs = st.lists(st.integers(0, 2), max_size=9)
trees = st.recursive(
    runs, lambda inner: st.tuples(runs, st.lists(inner, min_size=1, max_size=4)), max_leaves=12
)


def leaves(tree, before=()):
    """The token sequence of each leaf: a branch may part at the first token."""
    if isinstance(tree, list):
        return [[*before, *tree]]
    run, branches = tree
    return [leaf for branch in branches for leaf in leaves(branch, [*before, *run])]


@st.composite
def batches(draw):
    found = [leaf for tree in draw(st.lists(trees, min_size=1, max_size=4)) for leaf in leaves(tree)]
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    samples = []
    for tokens in draw(st.permutations([leaf for leaf in found if leaf] or [[1]])):
        size = len(tokens)
        mask = rng.random(size) < 0.7
        noise = [np.where(mask, rng.normal(mean, 1, size), 0).astype(np.float32) for mean in (-5, 0)]
        samples.append(Sample(np.array(tokens), mask, *noise, mask.astype(np.float32)))
    return samples


@pytest.fixture(scope="module", params=["titan", "titan value head", "hf", "hf windows"])
def engines(request, tmp_path_factory):
    """One that computes in fp32, its twin in float64, and the former's error on many tokens."""
    directory = tmp_path_factory.mktemp("model")
    if request.param == "hf windows":
        kinds = ["sliding_attention", "full_attention"]
        write_model(directory, "gemma3_text", sliding_window=8, layer_types=kinds)
    else:
        write_model(directory, "llama")
    if request.param.startswith("hf"):
        made = HFEngine(directory)
    else:
        made = TitanEngine(directory, EngineConfig(head="value" if "value" in request.param else "tokens"))
    with exact_twin(made, directory / "exact") as twin:
        pass
    if "value" in request.param:
        for one in (made, twin):
            weight = local(one._tensors["value_head.weight"].data)
            weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
    rng = np.random.default_rng(0)
    many = pack([supervised_sample([0], rng.integers(0, 3, 40)) for _ in range(8)])
    with float64():
        exact = twin.forward(many)
    return made, twin, error_of(made.forward(many), exact)


@pytest.fixture(scope="module", autouse=True)
def every_tree_counts():
    """However little it saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_WORTH_SHARING", 0)
        yield


def compute(engine, samples, max_tokens, share):
    """Packed tokens, outputs, metrics and gradients."""
    batch = pack(samples, max_tokens=max_tokens, share_prefixes=share)
    assert batch.num_unshared_tokens == sum(map(len, samples))
    outputs = engine.forward(batch)
    metrics = engine.forward_backward(batch, Clip())
    gradients = {n: p.grad.detach().clone() for n, p in engine._tensors.items() if p.grad is not None}
    engine._base.clear()
    return batch.num_tokens, outputs, metrics, gradients


@settings(max_examples=40, deadline=None)
@given(samples=batches(), max_tokens=st.sampled_from([64, 200]))
def test_trees_give_what_the_sequences_give(engines, samples, max_tokens):
    engine, twin, own_error = engines
    assert engine.packing["share_prefixes"]
    many, plain, before, expected = compute(engine, samples, max_tokens, share=False)
    few, shared, after, got = compute(engine, samples, max_tokens, share=True)
    with float64():
        _, exact, _, exact_gradients = compute(twin, samples, max_tokens, share=False)
    assert few <= many
    assert_close_as(plain, shared, exact, "outputs", least=own_error)
    # The relative error of a ratio, by which gradients and losses scale, is the error of its logprob.
    largest = max((g.abs().max().item() for g in exact_gradients.values()), default=0.0)
    assert_close_as(expected, got, exact_gradients, "gradients", least=own_error * largest)
    allowed = limit_by(plain, exact, least=own_error)
    assert before == pytest.approx(after, rel=allowed, abs=allowed)  # holds: reference
