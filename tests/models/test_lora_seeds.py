"""Any int64 is a seed of an adapter: those that a client sends reach torch, and no two of them draw the same."""

# holds: exact, the same draws or others

import random
import zlib

import pytest
import torch
from torch import nn

from rl.models.lora import Adapter, Site
from rl.types import LoRA

TARGETS = ("q_proj", "k_proj")
NAMES = [f"model.layers.0.self_attn.{target}" for target in TARGETS]
WORKED = (0, 1, 7, 2**31 - 1, 2**43 + 5, 18_446_688_000_000, -3, -9_223_000_000_000)
RNG = random.Random(0)
LARGE = (
    2**63 - 1,
    -(2**63),
    2**62,
    2**45,
    2**45 + 1,
    -(2**45),
    *(RNG.randrange(-(2**63), 2**63) for _ in range(200)),
)


def drawn(seed):
    sites = [Site(name, nn.Linear(4, 2)) for name in NAMES]
    adapter = Adapter(LoRA(3, 32.0, TARGETS), sites, seed, None, torch.device("cpu"))
    return [adapter.pair(name)[0].detach() for name in NAMES]


@pytest.mark.parametrize("seed", WORKED)
def test_seeds_that_worked_draw_what_they_drew(seed):
    for name, a in zip(NAMES, drawn(seed), strict=True):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        assert torch.equal(a, torch.empty(3, 4).uniform_(-0.5, 0.5, generator=generator))


def test_any_other_draws_what_no_other_does():
    """Those that worked are alike where they differ by a multiple of 2**32: of a seed torch uses 32 bits."""
    draws = {tuple(torch.stack(drawn(seed)).flatten().tolist()) for seed in (*WORKED, *LARGE)}
    assert len(draws) == len({*WORKED, *LARGE})
    assert all(torch.equal(*pair) for pair in zip(drawn(2**63 - 1), drawn(2**63 - 1), strict=True))
