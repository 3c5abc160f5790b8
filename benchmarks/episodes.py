"""256 episodes of two tool calls of 0 to 2 s each: what they cost the controller, and is the generator busy?

`python -m benchmarks.episodes [--rounds N]` writes docs/episodes.md. The generator is a stand-in that takes 30 ms a turn and has 64
places, so that only the controller and the episodes' processes are measured.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.pages import machine, spread, write_page
from rl.cluster.environment import prepare_environment

_NUM_EPISODES = 256
_PLACES = 64
_TURN_SECONDS = 0.03


NOTES = f"""{_NUM_EPISODES} episodes of two tool calls of 0 to 2 s each, all under way at a time, with a
stand-in for the generator ({1000 * _TURN_SECONDS:.0f} ms a turn, {_PLACES} places). Seconds and CPU: medians
of the rounds (least to most); places in use: the most of any. The tools alone take 2 s on average and 4 at
most. The agents' seconds are their own: {_NUM_EPISODES} processes that make OpenAI clients. What such a
client loads at its first request is loaded once, before episodes fork (`AgentEnv.prepare`)."""
_WAYS = {"the turn loop": "in-process", "agents on OpenAI's client": "endpoint"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    prepare_environment()
    machine()
    measured = {name: [] for name in _WAYS}
    for _ in range(rounds):
        for name, way in _WAYS.items():
            measured[name].append(asyncio.run(_measure(way)))
            print(name, measured[name][-1], flush=True)
    rows = [["", "seconds for all", "turns", "controller CPU a turn, ms", "generator's places in use"]]
    for name, of in measured.items():
        seconds, turns, cpu, share = zip(*of, strict=True)
        rows.append([name, spread(seconds, 1), str(turns[0]), spread(cpu, 1), f"{max(share):.0%}"])
    command = f"python -m benchmarks.episodes --rounds {rounds}"
    write_page("episodes", "What an episode costs", command, rows, NOTES, packages=("torchmonarch", "openai"))


async def _measure(name: str) -> tuple[float, int, float, float]:
    """Seconds for all, turns, milliseconds of the controller's CPU a turn, share of the generator's places."""
    from benchmarks.episodes_env import Caller, Waiting
    from rl.envs.base import RolloutContext
    from rl.envs.chat.endpoint import AgentEndpoint
    from rl.types import Prompt, SamplingParams
    from tests.envs.chat.templates import make_tokenizer

    env = Waiting() if name == "in-process" else Caller()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = make_tokenizer("qwen2_5", Path(directory))
        generator = _Generator(tokenizer)
        door = AgentEndpoint(tokenizer)
        async with _reward_pool(env) as pool:
            context = RolloutContext(generator, tokenizer, SamplingParams(200), 8000, pool, door)
            await env.drive(Prompt(env.generate(0), ()), 4, context)  # what is compiled and imported once
            generator.busy = 0.0
            cpu, began = time.process_time(), time.monotonic()
            groups: Sequence[Awaitable[Any]] = [
                env.drive(Prompt(env.generate(i), ()), 8, context) for i in range(_NUM_EPISODES // 8)
            ]
            rollouts = [rollout for group in await asyncio.gather(*groups) for rollout in group]
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
            await door.close()
    failed = [r.score.error for r in rollouts if r.score.error]
    assert not failed, failed[0]
    turns = sum(int(rollout.counts["turns"]) for rollout in rollouts)
    share = generator.busy / (seconds * _PLACES)
    return seconds, turns, 1e3 * cpu / turns, share


class _Generator:
    """Calls the tool twice, then ends; what it says is tokenised once."""

    def __init__(self, tokenizer: Any):
        said = ('<tool_call>{"name": "wait", "arguments": {}}</tool_call>', "done")
        self._call, self._done = ([*tokenizer.encode_plain(text), tokenizer.eos_id] for text in said)
        self._eos = tokenizer.eos_id
        self._messages = 0  # of the first prompt
        self._places = asyncio.Semaphore(_PLACES)
        self.busy = 0.0

    async def sample(self, prompt: Sequence[int], n: int, params: Any) -> list[Any]:
        from rl.types import Completion, StopReason, VersionRange

        async with self._places:
            await asyncio.sleep(_TURN_SECONDS)
            self.busy += _TURN_SECONDS
        messages = list(prompt).count(self._eos)
        self._messages = self._messages or messages
        tokens = self._done if messages >= self._messages + 4 else self._call  # two calls, two results
        return [Completion(tokens, [-1.0] * len(tokens), VersionRange(0, 0), StopReason.STOP)]


@asynccontextmanager
async def _reward_pool(env: Any) -> Any:
    """A real reward worker under Monarch, as a run has it."""
    import monarch.actor
    from monarch.actor import this_host

    monarch.actor.unhandled_fault_hook = lambda failure: None  # the pool ends its process by force

    from rl.actors.replica import Replica
    from rl.actors.reward import RewardPool, RewardProcess, RewardWorker
    from rl.observability.timeline import Timeline
    from rl.waiting import Deadlines, Signal, beside

    async def spawn() -> RewardProcess:
        mesh = this_host().spawn_procs(per_host={"procs": 1})
        actor = mesh.spawn("reward", RewardWorker, env, 5.0).slice(procs=0)
        process = RewardProcess("reward", mesh, actor, 600.0, Deadlines(), Timeline())
        await process.ready()
        return process

    changed = Signal()
    pool = RewardPool("reward worker", [Replica("reward", spawn, 0, changed)], changed, _NUM_EPISODES)
    async with beside(pool.run()):
        await pool.started()
        yield pool


if __name__ == "__main__":
    main()
