"""Episodes with a policy of the test's own in place of a generator: in real processes, or in this one."""

import asyncio
import pickle
from contextlib import asynccontextmanager
from dataclasses import replace

from rl.envs.base import RolloutContext
from rl.envs.chat.endpoint import AgentEndpoint
from rl.envs.chat.episode import EpisodeRunner
from rl.envs.chat.host import EpisodeHost
from rl.envs.chat.process import perform
from rl.errors import EpisodeFailed
from rl.types import Prompt, SamplingParams, Score


def play(
    env, tokenizer, policy, problem, n=1, max_tokens=20_000, through=lambda host: host, reward_seconds=10.0
):
    """through: what stands between the episodes and their host; it may note the host for the policy."""
    (rollouts,) = play_each(env, tokenizer, [(policy, problem)], n, max_tokens, through, reward_seconds)
    return rollouts


def play_each(
    env, tokenizer, episodes, n=1, max_tokens=20_000, through=lambda host: host, reward_seconds=10.0
):
    """The rollouts of each, one after the other on one host. episodes: (policy, problem)."""

    played = []

    async def walk():
        host, door = EpisodeHost(env, reward_seconds), AgentEndpoint(tokenizer)
        try:
            for policy, problem in episodes:
                sampling = SamplingParams(900)
                context = RolloutContext(policy, tokenizer, sampling, max_tokens, through(host), door)
                played.append(await env.drive(env.encode(problem, tokenizer), n, context))
        finally:
            await door.close()
            host.close()

    asyncio.run(walk())  # what it returned would be written out: `signal` has the task in an error's text
    return played


def play_here(env, tokenizer, policy, problem, n=1, max_tokens=20_000):
    """Rollouts of episodes whose code runs in a thread of this process, as it would in one of its own."""

    rollouts = []

    async def walk():
        door = AgentEndpoint(tokenizer)
        context = RolloutContext(policy, tokenizer, SamplingParams(900), max_tokens, Here(env), door)
        try:
            rollouts.extend(await env.drive(Prompt(problem, ()), n, context))
        finally:
            await door.close()

    asyncio.run(walk())  # what it returned would be written out: `signal` has the task in an error's text
    return rollouts


class Here:
    """See interfaces.Episodes."""

    def __init__(self, env):
        self.env, self.tools = env, env.tools()

    @asynccontextmanager
    async def open(self, problem, seed):
        yield HereEpisode(EpisodeRunner(self.env, self.tools, problem, seed))


class Ended(BaseException):
    """Raised by an environment's code: its process hangs or ends, and this is what its host raises."""


class HereEpisode:
    """What passes between it and its walk is pickled, as between processes."""

    def __init__(self, runner):
        self.runner = runner

    async def _ask(self, verb, *arguments):
        sent = pickle.loads(pickle.dumps(arguments))
        try:
            answer = await asyncio.to_thread(perform, self.runner, verb, sent)
        except Ended as end:
            raise end.args[0] from None
        if isinstance(answer, EpisodeFailed):
            raise answer
        return pickle.loads(pickle.dumps(answer))

    async def begin(self):
        return await self._ask("begin")

    async def step(self, message, malformed, tokens):
        reply = await self._ask("step", message, malformed, tokens)
        if not reply.done:
            return reply
        try:
            return replace(reply, score=await self.score())
        except EpisodeFailed as failure:
            return replace(reply, score=Score(0.0, str(failure), cause=failure.cause))

    async def act(self, base_url, api_key):
        await self.begin()
        await self._ask("act", base_url, api_key)

    async def score(self, *end):
        return await self._ask("score", *end)

    async def score_group(self, members):
        return await self._ask("score_group", members)
