"""A pair of answers that no micro-batch holds is told before a run."""

from dataclasses import dataclass, replace

import pytest

from configs.algorithms import dpo
from rl.config.taught_rules import check_taught
from rl.envs.base import Env
from rl.types import Problem

ANSWER = 30


@dataclass(frozen=True)
class Pairs(Env):
    num_eval: int = 2
    max_new_tokens: int = 40

    def generate(self, seed):
        return Problem(str(seed), "abcdef>", str(seed))

    def reward(self, problem, response, stop):
        return 0.0

    def preference(self, problem, seed):
        return "a" * ANSWER, "b" * ANSWER


@pytest.mark.parametrize("shares", [True, False])
def test_a_pair_has_to_fit_a_micro_batch(shares):
    config = replace(dpo(), env=Pairs())
    tokenizer = config.model.tokenizer()
    prompt = len(config.env.encode(config.env.train_problem(0), tokenizer).tokens)
    pair = 2 * (ANSWER + 1) + (prompt if shares else 2 * prompt)

    def check(room):
        trainer = replace(config.trainer, micro_batch_tokens=room, share_prefixes=shares)
        return check_taught(replace(config, trainer=trainer), tokenizer, 100)

    assert check(pair) == []
    (problem,) = check(pair - 1)
    if shares:  # with dropout Hugging Face's engine shares nothing
        for dropout in (False, True):
            hf = replace(config.trainer, engine="hf", dropout=dropout, micro_batch_tokens=pair)
            assert bool(check_taught(replace(config, trainer=hf), tokenizer, 100)) is dropout
    assert f"has {pair} tokens" in problem
    assert f"trainer.micro_batch_tokens={pair - 1}; raise that, or shorten them" in problem
