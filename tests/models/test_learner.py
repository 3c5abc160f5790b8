"""The learner's weight decay: of all weights, or of matrices alone; and an update that is undone."""

# holds: exact

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from rl.errors import ConfigError, NotFinite, RunError
from rl.models import adapters as module
from rl.models.engine_config import EngineConfig
from rl.models.learner import Learner
from rl.models.lora import Site
from rl.types import LoRA, OptimParams


def test_norms_biases_and_embeddings_can_be_spared_the_weight_decay():
    names = ("model.embed_tokens.weight", "model.norm.weight", "layers.0.mlp.up_proj.weight", "layers.0.bias")
    for decay_all in (True, False):
        parameters = {
            name: nn.Parameter(torch.ones(2, 2) if "norm" not in name else torch.ones(2)) for name in names
        }
        parameters["layers.0.bias"] = nn.Parameter(torch.ones(2))
        learner = Learner(parameters)
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        learner.step(OptimParams(lr=0.5, weight_decay=0.2, decay_all=decay_all))
        decayed = [name for name, p in parameters.items() if not torch.equal(p, torch.ones_like(p))]
        assert decayed == (list(names) if decay_all else ["layers.0.mlp.up_proj.weight"])
        assert torch.allclose(parameters["layers.0.mlp.up_proj.weight"], torch.full((2, 2), 1 - 0.5 * 0.2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_after_a_gradient_that_is_refused_the_next_step_is_that_of_its_own_gradient(bad):
    """Twins, of which one met a bad gradient first."""
    twins = [nn.Parameter(torch.tensor([[1.0, 2.0]])) for _ in range(2)]
    met, other = (Learner({"layers.0.weight": parameter}) for parameter in twins)
    twins[0].grad = torch.tensor([[1.0, bad]])
    with pytest.raises(NotFinite, match="the gradient norm is .*; the step was not applied"):
        met.step(OptimParams(lr=0.1))
    assert torch.equal(twins[0], torch.tensor([[1.0, 2.0]])) and twins[0].grad is None
    with pytest.raises(RunError, match="without a gradient"):
        met.step(OptimParams(lr=0.1))
    for _ in range(2):
        for learner, parameter in zip((met, other), twins, strict=True):
            parameter.grad = torch.tensor([[3.0, 4.0]])
            assert learner.step(OptimParams(lr=0.1)) == {"grad_norm": 5.0}
            assert parameter.grad is None
        assert torch.equal(*twins)


def test_a_gradient_is_divided_and_then_clipped():
    """A norm of 5 under the bound of 10 stays as it is; of 10 times that a fifth is left."""
    moved = []
    for factor in (1.0, 10.0):
        parameter = nn.Parameter(torch.zeros(1, 2))
        learner = Learner({"layers.0.weight": parameter})
        parameter.grad = factor * torch.tensor([[6.0, 8.0]])
        gradients = []
        learner._optimizer.step = lambda p=parameter, g=gradients: g.append(p.grad.clone())
        norm = learner.step(OptimParams(lr=0.1, grad_scale=0.5, max_grad_norm=10.0))["grad_norm"]
        assert norm == 5 * factor
        moved.append(gradients[0].norm().item())
    assert moved == pytest.approx([5.0, 10.0], rel=1e-5)


UNBOUNDED = [
    {"lr": 1e38, "weight_decay": 1e38},  # finite in fp32; their product is not
    {"lr": 1e39},  # not even that
    {"lr": 1.7e308},
    {"lr": 3e38, "weight_decay": 0.0, "betas": (0.0, 0.0)},
    {"lr": 1e-3, "eps": 0.0},  # 0 / 0 for a parameter without a gradient
]


@pytest.fixture
def adapters(monkeypatch):
    monkeypatch.setattr(module, "_ranks_with_the_same_weights", lambda config: None)
    sites = [Site(f"model.layers.{i}.self_attn.q_proj", nn.Linear(3, 2)) for i in range(2)]
    adapters = module.Adapters(EngineConfig(adapters=True), sites, None, torch.device("cpu"))
    for name in ("mine", "twin"):
        adapters.add(name, LoRA(2, 32.0, ("q_proj",)), seed=1)
    return adapters


def give_gradients(adapters, name, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapters[name].parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    next(iter(adapters[name].parameters.values())).grad.zero_()


@pytest.mark.parametrize("params", UNBOUNDED)
@pytest.mark.parametrize("num_steps", [0, 3])
def test_an_adapters_update_that_overflows_leaves_it_as_it_was(adapters, num_steps, params):
    """Weights, moments and all that comes after it are those of an adapter that never had it."""
    for seed in range(num_steps):
        for name in ("mine", "twin"):
            give_gradients(adapters, name, seed)
            adapters.learner(name).step(OptimParams(lr=1e-2))
    give_gradients(adapters, "mine", 100)
    with pytest.raises(NotFinite, match="lr=.*, which was undone; lower the learning rate") as error:
        adapters.learner("mine").step(OptimParams(**params))
    assert error.value.metric == "weights"
    for seed in range(101, 103):
        mine, twin = (adapters.learner(name).state() for name in ("mine", "twin"))
        for name, tensors in twin.items():
            for key, tensor in tensors.items():
                assert torch.equal(mine[name][key], tensor), (name, key)
        for name in ("mine", "twin"):
            give_gradients(adapters, name, seed)
            adapters.learner(name).step(OptimParams(lr=1e-2))


def test_without_undo_no_copy_is_made_and_none_is_promised():
    parameter = nn.Parameter(torch.ones(2, 2))
    learner = Learner({"layers.0.weight": parameter})
    parameter.grad = torch.ones(2, 2)
    with pytest.raises(NotFinite, match=r"weight_decay=1e\+38; lower the learning rate"):
        learner.step(OptimParams(lr=1e38, weight_decay=1e38))
    assert not torch.isfinite(parameter).all()


def test_without_a_bound_a_gradient_is_divided_alone():
    parameter, gradients = nn.Parameter(torch.zeros(1, 2)), []
    learner = Learner({"layers.0.weight": parameter})
    parameter.grad = torch.tensor([[600.0, 800.0]])
    learner._optimizer.step = lambda: gradients.append(parameter.grad.tolist())
    assert learner.step(OptimParams(lr=0.1, grad_scale=0.5, max_grad_norm=0.0)) == {"grad_norm": 500.0}
    assert gradients == [[[300.0, 400.0]]]


def test_moments_are_where_their_parameter_is():
    """What is made without a device lands on the default one: here one without data."""
    learner = Learner({"layers.0.weight": nn.Parameter(torch.ones(2, 2)), "norm": torch.ones(2)})
    with torch.device("meta"):
        state = learner.state()
    assert {t.device.type for part in state.values() for t in part.values()} == {"cpu"}
    assert state["layers.0.weight"].keys() == {"value", "step", "exp_avg", "exp_avg_sq"}


def test_a_reset_forgets_the_moments_and_the_gradient():
    """Twins, of which one learned something else before."""
    twins = [nn.Parameter(torch.tensor([[1.0, 2.0]])) for _ in range(2)]
    reset, other = (Learner({"layers.0.weight": parameter}) for parameter in twins)
    twins[0].grad = torch.tensor([[5.0, -6.0]])
    reset.step(OptimParams(lr=0.1))
    twins[0].data.copy_(twins[1].data)
    twins[0].grad = torch.tensor([[7.0, 8.0]])
    reset.reset()
    assert twins[0].grad is None
    for learner, parameter in zip((reset, other), twins, strict=True):
        parameter.grad = torch.tensor([[3.0, 4.0]])
        learner.step(OptimParams(lr=0.1))
    assert torch.equal(*twins)


def test_the_model_computes_alone_again_after_an_adapter(adapters):
    """Also where what computed with it failed."""
    linear, x = adapters._sites[0].linear, torch.ones(1, 3)
    alone = linear(x)
    for parameter in adapters["mine"].parameters.values():
        parameter.data.fill_(1.0)
    with adapters.attached("mine"):
        assert not torch.equal(linear(x), alone)
    assert torch.equal(linear(x), alone)
    with pytest.raises(ValueError, match="a loss"), adapters.attached("mine"):
        raise ValueError("a loss")
    assert torch.equal(linear(x), alone)


def test_an_adapter_takes_anothers_weights_and_keeps_its_own_moments(adapters):
    adapters.add("other", LoRA(2, 32.0, ("q_proj",)), seed=2)

    def learn(name, seed):
        give_gradients(adapters, name, seed)
        adapters.learner(name).step(OptimParams(lr=1e-2))

    def state(name):
        tensors = adapters.learner(name).state()
        return {n: {key: t.clone() for key, t in part.items()} for n, part in tensors.items()}

    def is_now(name, expected):
        return all(
            torch.equal(tensor, expected[n][key])
            for n, part in state(name).items()
            for key, tensor in part.items()
        )

    learn("mine", 0)
    learn("other", 1)
    mine, other = state("mine"), state("other")
    assert any(not torch.equal(mine[n]["value"], part["value"]) for n, part in other.items())
    adapters.copy("mine", "other")
    assert is_now("mine", mine)
    assert is_now("other", {n: {**part, "value": mine[n]["value"]} for n, part in other.items()})
    learn("other", 2)
    assert is_now("mine", mine)  # a copy, which learns apart


def test_a_record_that_does_not_say_what_learnt_is_of_adapters_where_it_names_some(adapters):
    """As checkpoints of older versions have it."""
    lora = asdict(LoRA(2, 32.0, ("q_proj",)))
    adapters.match({"mine": lora, "third": lora}, None, Path("old"))
    assert sorted(adapters) == ["mine", "third"]
    with pytest.raises(RunError, match="old holds a model's weights, which is not what learns here"):
        adapters.match({}, None, Path("old"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lacks a matrix", "not those of this model and these targets"),
        ("has one of another layer", "not those of this model and these targets"),
        ("has another rank", r"has shape \(1, 3\) in the adapter but \(2, 3\) in the model"),
    ],
)
def test_tensors_of_another_adapter_are_refused(adapters, fault, words):
    tensors = {name: torch.ones(p.shape) for name, p in adapters["mine"].parameters.items()}
    first = next(iter(tensors))
    if fault == "lacks a matrix":
        del tensors[first]
    elif fault == "has one of another layer":
        tensors[first.replace("layers.0", "layers.7")] = tensors[first]
    else:
        tensors[first] = tensors[first][:1]
    with pytest.raises(ConfigError, match=words):
        adapters["mine"].load(tensors)


def test_an_adapter_has_a_rank_of_at_least_one(adapters):
    adapters.add("narrow", LoRA(1, 1.0, ("q_proj",)))
    assert [tuple(p.shape) for p in adapters["narrow"].parameters.values()] == [(1, 3), (2, 1)] * 2
    with pytest.raises(ConfigError, match="lora.rank=0 must be at least 1 for an adapter"):
        adapters.add("none", LoRA(0, 1.0, ("q_proj",)))
    assert "none" not in [*adapters]


def test_ranks_with_the_same_parameters_add_their_gradients():
    """Two ranks, each a thread, take the step of one learner that was given the sum."""
    gradients = [
        [torch.tensor([[3.0, -1.0]]), torch.tensor([2.0])],
        [torch.tensor([[1.0, 5.0]]), torch.tensor([4.0])],
    ]
    store = dist.HashStore()

    def step(own, group=None):
        parameters = {
            name: nn.Parameter(torch.zeros_like(g)) for name, g in zip(("a", "b"), own, strict=True)
        }
        learner = Learner(parameters, group)
        for parameter, gradient in zip(parameters.values(), own, strict=True):
            parameter.grad = gradient.clone()
        norm = learner.step(OptimParams(lr=0.1))["grad_norm"]
        return norm, [parameter.tolist() for parameter in parameters.values()]

    def step_of_rank(rank):
        return step(gradients[rank], dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20)))

    with ThreadPoolExecutor(2) as ranks:
        both = list(ranks.map(step_of_rank, range(2)))
    assert both[0] == both[1] == step([a + b for a, b in zip(*gradients, strict=True)])
