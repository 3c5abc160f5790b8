"""Random prefix trees against the same sequences side by side: outputs, losses and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl import batching
from rl.batching import pack
from rl.loss.clip import Clip
from rl.models.engine_config import EngineConfig
from rl.models.hf_engine import HFEngine
from rl.models.learner import local
from rl.models.titan import TitanEngine
from rl.types import Sample
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
def engine(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    if request.param == "hf windows":
        kinds = ["sliding_attention", "full_attention"]
        write_model(directory, "gemma3_text", sliding_window=8, layer_types=kinds)
    else:
        write_model(directory, "llama")
    if request.param.startswith("hf"):
        return HFEngine(directory)
    made = TitanEngine(directory, EngineConfig(head="value" if "value" in request.param else "tokens"))
    if "value" in request.param:
        weight = local(made._tensors["value_head.weight"].data)
        weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
    return made


@pytest.fixture(scope="module", autouse=True)
def every_tree_counts():
    """However little it saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_WORTH_SHARING", 0)
        yield


@settings(max_examples=40, deadline=None)
@given(samples=batches(), max_tokens=st.sampled_from([64, 200]))
def test_trees_give_what_the_sequences_give(engine, samples, max_tokens):
    assert engine.packing["share_prefixes"]
    found = []
    for share in (False, True):
        batch = pack(samples, max_tokens=max_tokens, share_prefixes=share)
        assert batch.num_unshared_tokens == sum(map(len, samples))
        outputs = engine.forward(batch)
        metrics = engine.forward_backward(batch, Clip())
        gradients = [p.grad for p in engine._tensors.values() if p.grad is not None]
        gradients = [g.detach().clone() for g in gradients]
        engine._base.clear()
        found.append((batch.num_tokens, outputs, metrics, gradients))
    (many, plain, before, expected), (few, shared, after, got) = found
    assert few <= many
    assert plain.keys() == shared.keys()
    assert all(np.abs(plain[i] - shared[i]).max() < 1e-5 for i in plain)
    assert before == pytest.approx(after, rel=1e-5, abs=1e-5)
    scale = max([1.0, *(g.abs().max().item() for g in expected)])
    assert len(expected) == len(got)
    assert all((a - b).abs().max() < 1e-5 * scale for a, b in zip(expected, got, strict=True))
