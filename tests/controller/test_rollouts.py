"""Prompts that are made before their turn: one that has started is kept by nobody."""

import asyncio
import random

import pytest

from rl.controller.rollouts import Rollouts, check_rewards
from rl.envs.sort_letters import SortLetters
from rl.errors import RunError
from rl.types import Completion, Group, Score, StopReason, VersionRange
from tests.envs.test_envs import Spelled

NUM_PROMPTS = 24


class Sampler:
    """`asked`: what reached the generators, (number of samples, SamplingParams) of each call."""

    def __init__(self):
        self.asked = []

    async def sample(self, prompt, n, params):
        self.asked.append((n, params))
        await asyncio.sleep(0)
        return [Completion([97], [-1.0], VersionRange(0, 0), StopReason.STOP)] * n


async def score(rollouts):
    return [Score(1.0) for _ in rollouts]


def kept(rollouts):
    """The prompts in whatever the owner holds."""
    return rollouts._prepared._prompts


@pytest.mark.parametrize("seed", range(20))
def test_nothing_stays_of_a_prompt_that_has_started(seed):
    """Batches are prepared while others start, in any order and at any await; some start twice, as after a resume."""
    rng = random.Random(seed)
    rollouts = Rollouts(SortLetters(num_eval=8), Spelled(), score, 2, 0, max_tokens=99)

    async def start(indices):
        for index in indices:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            group = await rollouts.train_group(index, Sampler())
            assert group.rollouts[0].problem == rollouts._train_prompt(index).problem
            assert group.scores == (Score(1.0), Score(1.0))

    async def main():
        order = [*range(NUM_PROMPTS), *rng.sample(range(NUM_PROMPTS), 4)]
        if seed % 2:
            rng.shuffle(order)
        tasks = [asyncio.create_task(start(order[i::3])) for i in range(3)]
        while not all(task.done() for task in tasks):
            first = rng.randrange(NUM_PROMPTS)
            preparing = asyncio.create_task(rollouts.prepare(range(first, min(NUM_PROMPTS, first + 6))))
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                preparing.cancel()
            tasks.append(preparing)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not kept(rollouts)
        await rollouts.prepare(range(NUM_PROMPTS))
        assert not kept(rollouts)
        await rollouts.prepare(range(NUM_PROMPTS, NUM_PROMPTS + 3))
        assert set(kept(rollouts)) == {NUM_PROMPTS, NUM_PROMPTS + 1, NUM_PROMPTS + 2}

    asyncio.run(main())


def test_training_samples_at_temperature_1_and_evaluation_is_greedy():
    """Losses take the generator's logprobs for those of the policy itself, at temperature 1."""
    env, sampler = SortLetters(num_eval=8), Sampler()
    rollouts = Rollouts(env, Spelled(), score, 2, 0, max_tokens=99)
    asyncio.run(rollouts.train_group(0, sampler))
    ((num_samples, params),) = sampler.asked
    assert (num_samples, params.temperature, params.max_new_tokens) == (2, 1.0, env.max_new_tokens)
    assert Spelled().eos_id in params.stop_token_ids
    sampler.asked.clear()
    asyncio.run(rollouts.evaluate(sampler))
    assert [(n, p.temperature) for n, p in sampler.asked] == [(1, 0.0)] * 8
    sampler.asked.clear()
    asyncio.run(rollouts.evaluate(sampler, size=3, temperature=0.7))
    assert [(n, p.temperature) for n, p in sampler.asked] == [(3, 0.7)] * 8


def test_an_environment_that_raises_in_a_run_is_named():
    """Its data may have changed since: the run ends as of any other failure, with what to go on from."""

    class Gone(SortLetters):
        def train_problem(self, seed):
            raise FileNotFoundError(2, "No such file", "rows.jsonl")

    rollouts = Rollouts(Gone(num_eval=8), Spelled(), score, 2, 0, max_tokens=99)
    with pytest.raises(
        RunError, match="env Gone makes no problem of prompt 3: FileNotFoundError.*rows.jsonl"
    ):
        asyncio.run(rollouts.train_group(3, Sampler()))


def test_seeds_are_of_32_bits_and_each_prompt_has_its_own():
    """An engine takes no larger ones."""
    env, sampler = SortLetters(num_eval=40), Sampler()
    rollouts = Rollouts(env, Spelled(), score, 2, 0, max_tokens=99)

    async def sample():
        for index in range(40):
            await rollouts.train_group(index, sampler)
        await rollouts.evaluate(sampler)

    asyncio.run(sample())
    seeds = {params.seed for _, params in sampler.asked}
    assert len(sampler.asked) == len(seeds) == 80 and all(0 <= seed < 2**32 for seed in seeds)


def test_a_task_that_gives_no_reward_is_recorded_and_ends_the_run():
    """But for what the policy brings about in a run that has trained."""

    def failed(cause):
        scores = (Score(0.0, f"{cause} first", cause=cause), Score(0.0, f"{cause} then", cause=cause))
        return Group(0, (), scores)

    recorded = []
    with pytest.raises(RunError, match="^all 2 rewards failed, the first: lost first; see logs/reward-0.log"):
        check_rewards([failed("lost")], has_trained=True, record=recorded.append)
    assert recorded == [[failed("lost")]]
    with pytest.raises(RunError, match="^all 2 rewards failed, the first: raised first"):
        check_rewards([failed("raised")])
    check_rewards([failed("raised")], has_trained=True, record=recorded.append)
    check_rewards([failed("lost"), Group(1, (), (Score(1.0),))], record=recorded.append)
    assert len(recorded) == 1


def test_prompts_are_made_one_in_a_turn_of_the_event_loop():
    """Making one may take a while: generators and agents are answered in between."""
    turns, made = 0, []

    class Noting(SortLetters):
        def train_problem(self, seed):
            made.append(turns)
            return super().train_problem(seed)

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main():
        counting = asyncio.create_task(count())
        rollouts = Rollouts(Noting(num_eval=8), Spelled(), score, 2, 0, max_tokens=99)
        await rollouts.prepare(range(4))
        counting.cancel()
        assert len(kept(rollouts)) == 4

    asyncio.run(main())
    assert len(set(made)) == 4


def test_the_door_of_agents_is_closed_with_the_rollouts():
    closed = []

    class Opened:
        async def close(self):
            closed.append(self)

    door = Opened()
    asyncio.run(Rollouts(SortLetters(num_eval=8), Spelled(), None, 2, 0, max_tokens=99, door=door).close())
    assert closed == [door]
