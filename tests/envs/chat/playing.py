"""Episodes in real processes, with a policy of the test's own in place of a generator."""

import asyncio

from rl.envs.base import RolloutContext
from rl.envs.chat.endpoint import AgentEndpoint
from rl.envs.chat.host import EpisodeHost
from rl.types import Prompt, SamplingParams


def play(
    env, tokenizer, policy, problem, n=1, max_tokens=20_000, through=lambda host: host, reward_seconds=10.0
):
    """through: what stands between the episodes and their host; it may note the host for the policy."""

    async def walk():
        host, door = EpisodeHost(env, reward_seconds), AgentEndpoint(tokenizer)
        context = RolloutContext(policy, tokenizer, SamplingParams(900), max_tokens, through(host), door)
        try:
            return await env.drive(Prompt(problem, ()), n, context)
        finally:
            await door.close()
            host.close()

    return asyncio.run(walk())
