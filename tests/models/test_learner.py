"""The learner's weight decay: of all weights, or of matrices alone."""

# holds: exact

import torch
from torch import nn

from rl.models.learner import Learner
from rl.types import OptimParams


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
