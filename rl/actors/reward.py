"""RewardWorker: runs an environment's code away from the controller; and the pool that spreads the work."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint

from rl.actors.remote import Caller, Deadline, ProcessDied, ProcessSilent, only
from rl.actors.replica import Pool, Replica
from rl.envs.base import Env
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import EndedEpisode, Opening, Reply
from rl.envs.chat.host import EpisodeHost, HostedEpisode
from rl.envs.verifier import START_SECONDS, NotStartedAgain, Verifier
from rl.errors import EpisodeFailed, EpisodeLost
from rl.observability.timeline import Timeline
from rl.processes import ProcessInfo, kill_processes, process_info
from rl.types import Message, Problem, Rollout, Score, StopReason
from rl.waiting import Deadlines, Signal, beside

T = TypeVar("T")
_MARGIN_SECONDS = 60.0  # beyond the worker's own limits
_NUMBERS = count()  # of episodes, in the controller


@dataclass(frozen=True, slots=True)
class EpisodeCall:
    """A verb of EpisodeProcess."""

    number: int  # of the episode
    verb: str
    arguments: tuple
    opens: tuple[Problem, int] | None  # of the first call: the problem, and the episode's seed


def _ends(call: EpisodeCall, answer: Any) -> bool:
    """That was the episode's last call; its process is ended."""
    return call.verb in ("score", "score_group") or (isinstance(answer, Reply) and answer.done)


@contextmanager
def _as_death() -> Iterator[None]:
    """A worker whose environment does not start again is as good as dead: another takes its place."""
    try:
        yield
    except NotStartedAgain as error:
        raise ProcessDied(str(error)) from error


class RewardWorker(Actor):
    """Runs an environment's code: its reward function, or, of a ChatEnv, whole episodes."""

    def __init__(self, env: Env, limit_seconds: float):
        self._verifier = None if isinstance(env, ChatEnv) else Verifier(env, limit_seconds)
        self._host = EpisodeHost(env, limit_seconds) if isinstance(env, ChatEnv) else None
        self._episodes: dict[int, tuple[HostedEpisode, AsyncExitStack]] = {}
        self._given_up: set[int] = set()  # before they were open

    @concurrent_endpoint
    async def ready(self) -> ProcessInfo:
        return process_info()

    @concurrent_endpoint
    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout. If a reward raises or exceeds the limit, its Score gives the cause."""
        assert self._verifier is not None
        with _as_death():
            return await asyncio.to_thread(self._verifier.score, rollouts)

    @concurrent_endpoint
    async def ask_episode(self, call: EpisodeCall) -> Any:
        """What a verb of its process returned; an EpisodeFailed or EpisodeLost is returned, too."""
        assert self._host is not None
        try:
            if call.opens:
                async with AsyncExitStack() as stack:
                    with _as_death():
                        episode = await stack.enter_async_context(self._host.open(*call.opens))
                    self._episodes[call.number] = episode, stack.pop_all()
                if call.number in self._given_up:
                    self._given_up.remove(call.number)
                    await self._close(call.number)
                    return EpisodeLost()
            answer = await getattr(self._episodes[call.number][0], call.verb)(*call.arguments)
        except (EpisodeFailed, EpisodeLost) as failure:
            answer = failure
        if _ends(call, answer) and call.number in self._episodes:  # one that could not begin is not
            await self._close(call.number)
        return answer

    @concurrent_endpoint
    async def close_episode(self, number: int) -> None:
        if number in self._episodes:
            await self._close(number)
        else:
            self._given_up.add(number)

    async def _close(self, number: int) -> None:
        await self._episodes.pop(number)[1].aclose()


class RewardProcess:
    """A running reward worker. See member.Member."""

    def __init__(
        self, name: str, mesh: Any, actor: Any, limit_seconds: float, deadlines: Deadlines, timeline: Timeline
    ):
        self._mesh = mesh
        self._actor = actor
        self._limit = limit_seconds
        self._deadlines = deadlines
        self._timeline = timeline
        self._caller = Caller(name, f"logs/{name}.log of the run")

    async def ready(self) -> None:
        deadline = Deadline("start", self._deadlines.start)
        self._caller.processes = (
            await self._caller.call(only(self._actor.ready.call()), "start", deadline, past=ProcessSilent),
        )

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        # The worker limits each call of the reward function; past the limit its process is started again. One
        # call more: what was given up before ends first.
        seconds = (len(rollouts) + 1) * (self._limit + START_SECONDS)
        with self._timeline.span(self._caller.name, "score"):
            call = only(self._actor.score.call(rollouts))
            return await self._caller.call(
                call, "score", Deadline("reward.limit_seconds", seconds), past=ProcessDied
            )

    async def ask_episode(self, call: EpisodeCall) -> Any:
        """The worker limits what it waits for."""
        with self._timeline.span(self._caller.name, "episodes"):
            asked = only(self._actor.ask_episode.call(call))
            return await self._caller.call(asked, call.verb, self._patience, past=ProcessDied)

    async def close_episode(self, number: int) -> None:
        asked = only(self._actor.close_episode.call(number))
        await self._caller.call(asked, "close_episode", self._patience, past=ProcessDied)

    @property
    def _patience(self) -> Deadline:
        return Deadline("env.turn_seconds or env.episode_seconds", self._limit + _MARGIN_SECONDS)

    async def check(self) -> None:
        deadline = Deadline("progress", self._deadlines.progress)
        async with beside(self._caller.until_gone("ready")):
            await self._caller.call(only(self._actor.ready.call()), "ready", deadline, past=ProcessDied)

    async def kill(self) -> None:
        await kill_processes(self._mesh, self._caller.processes)


class RewardPool(Pool[Replica[RewardProcess]]):
    """The workers as one. Each verifies one group at a time; all have up to `max_episodes` under way."""

    def __init__(
        self, name: str, replicas: Sequence[Replica[RewardProcess]], changed: Signal, max_episodes: int
    ):
        super().__init__(name, replicas, changed)
        self._room = asyncio.Semaphore(max_episodes)
        self._num_episodes = dict.fromkeys(replicas, 0)
        # As many ask as there are workers; without it, each verdict would wake all groups that wait.
        self._turns = asyncio.Semaphore(len(replicas))

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        async with self._turns:
            return await self.ask(
                lambda replica: replica.ask(lambda process: process.score(rollouts)),
                takes=lambda replica: replica.load == 0,
            )

    @asynccontextmanager
    async def open(self, problem: Problem, seed: int) -> AsyncIterator["RemoteEpisode"]:
        """A process for an episode, of the worker with the fewest of them. See interfaces.Episodes."""
        async with self._room:
            await self.changed.wait_for(lambda: bool(self._taking_work()) or self.num_alive == 0)
            self.check_alive()
            replica = min(self._taking_work(), key=self._num_episodes.__getitem__)
            self._num_episodes[replica] += 1
            episode = RemoteEpisode(replica, problem, seed)
            try:
                yield episode
            finally:
                self._num_episodes[replica] -= 1
                await asyncio.shield(episode.close())

    def _taking_work(self) -> list[Replica[RewardProcess]]:
        return [replica for replica in self.replicas if replica.takes_work]


class RemoteEpisode:
    """An EpisodeProcess (rl/interfaces.py) of a reward worker, which may die meanwhile."""

    def __init__(self, replica: Replica[RewardProcess], problem: Problem, seed: int):
        self._replica = replica
        self._life = replica.num_restarts
        self._opens: tuple[Problem, int] | None = problem, seed
        self._number = next(_NUMBERS)
        self._has_ended = False

    async def begin(self) -> Opening:
        return await self._verb("begin")

    async def step(self, message: Message, malformed: Sequence[str], tokens: Sequence[int]) -> Reply:
        return await self._verb("step", message, malformed, tokens)

    async def act(self, base_url: str, api_key: str) -> None:
        await self._verb("act", base_url, api_key)

    async def score(
        self,
        stop: StopReason,
        untold: Sequence[Message],
        turn_tokens: Sequence[Sequence[int]],
        answers: Sequence[str],
    ) -> Score:
        return await self._verb("score", stop, untold, turn_tokens, answers)

    async def score_group(self, members: Sequence[EndedEpisode]) -> list[Score]:
        return await self._verb("score_group", members)

    async def close(self) -> None:
        if self._opens is None and not self._has_ended:
            with suppress(EpisodeLost):
                await self._ask(lambda process: process.close_episode(self._number))

    async def _verb(self, verb: str, *arguments: Any) -> Any:
        call = EpisodeCall(self._number, verb, arguments, self._opens)
        self._opens = None
        answer = await self._ask(lambda process: process.ask_episode(call))
        self._has_ended = _ends(call, answer)
        if isinstance(answer, EpisodeFailed | EpisodeLost):
            raise answer
        return answer

    async def _ask(self, invoke: Callable[[RewardProcess], Awaitable[T]]) -> T:
        replica = self._replica
        if replica.num_restarts != self._life or not replica.takes_work:
            raise EpisodeLost
        try:
            return await replica.ask(invoke)
        except ProcessDied as death:
            raise EpisodeLost from death
