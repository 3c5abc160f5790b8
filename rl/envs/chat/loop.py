"""The turn loop: the policy and an environment take turns until one of them ends the episode.

Whatever fails costs its own sample: it becomes a rollout whose Score has the cause. rl/causes.py says what
comes of each; before the policy's first turn nothing is its failure.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from rl.causes import is_policys
from rl.envs.base import RolloutContext, derive_seed
from rl.envs.chat.episode import EndedEpisode, ToolResult
from rl.envs.chat.session import ChatSession, TooLong, Turn, Unwritable
from rl.envs.chat.template import ChatTemplate
from rl.envs.verifier import check_parts
from rl.errors import EpisodeFailed, EpisodeLost
from rl.interfaces import Door, EpisodeProcess, Episodes, Tokenizer
from rl.types import Message, Problem, Rewards, Rollout, Score, Segment, StopReason
from rl.waiting import within

if TYPE_CHECKING:
    from rl.envs.chat.env import ChatEnv

_MAX_LOST = 4
_Played = tuple[Rollout, EndedEpisode]


async def play_group(env: "ChatEnv", problem: Problem, n: int, context: RolloutContext) -> Sequence[Rollout]:
    """n episodes of one problem, beside each other. Seeds follow from the group's, sample and turn."""
    return await _play_all(env, problem, n, context, _Walk)


async def play_agents(env: "ChatEnv", problem: Problem, n: int, context: RolloutContext) -> Sequence[Rollout]:
    """n episodes in which an agent of the environment's asks for the policy's turns (AgentEnv)."""
    assert context.door is not None  # a run with an AgentEnv has one
    walks = partial(_AgentWalk, door=context.door)
    return await _play_all(env, problem, n, context, walks)


async def _play_all(
    env: "ChatEnv", problem: Problem, n: int, context: RolloutContext, walks: Callable[..., "_Walk"]
) -> Sequence[Rollout]:
    played = await asyncio.gather(*(_play(env, problem, i, context, walks) for i in range(n)))
    if not env.rewards_groups:
        return [rollout for rollout, _ in played]
    return await _compared(env, problem, played, context)


async def _compared(
    env: "ChatEnv", problem: Problem, played: Sequence[_Played], context: RolloutContext
) -> Sequence[Rollout]:
    """With what reward_group adds to their rewards, where at least two are left. Where it fails, it fails for
    all."""
    assert context.episodes is not None
    compared = [(r, end) for r, end in played if r.score is not None and r.score.error is None]
    good, members = [r for r, _ in compared], [end for _, end in compared]
    if len(members) < 2:  # as in an evaluation: nobody is better than another
        return [rollout for rollout, _ in played]
    seed = derive_seed(context.params.seed, "group")
    for _ in range(_MAX_LOST):
        try:
            async with context.episodes.open(problem, seed) as process:
                scores = await process.score_group(members)
            break
        except EpisodeLost:
            scores = [Score(0.0, "its process was lost", cause="lost")] * len(good)
        except EpisodeFailed as failure:
            scores = [Score(0.0, str(failure), cause=failure.cause)] * len(good)
            break
    added = {id(rollout): score for rollout, score in zip(good, scores, strict=True)}
    return [replace(r, score=_sum(r.score, added[id(r)])) if id(r) in added else r for r, _ in played]


def _sum(own: Score | None, added: Score) -> Score:
    """The group's part is given for the last turn. Whether the answer is right stays the episode's own."""
    assert own is not None
    if added.error is not None:
        return added
    turns, tokens = own.parts.turns, own.parts.tokens
    parts = Rewards(
        (*turns[:-1], turns[-1] + added.reward) if turns else (),
        (*tokens[:-1], tokens[-1] + added.reward) if tokens else (),
    )
    components = {**(own.components or {"episode": own.reward}), "group": added.reward}
    correct = own.correct if added.verdict is None else added.verdict
    return replace(own, reward=own.reward + added.reward, parts=parts, components=components, verdict=correct)


async def _play(
    env: "ChatEnv", problem: Problem, sample: int, context: RolloutContext, walks: Callable[..., "_Walk"]
) -> _Played:
    """An episode whose process, or generator, died with others' begins again, with the same seeds."""
    assert context.episodes is not None  # a run with a ChatEnv has them
    for _ in range(_MAX_LOST):
        walk = walks(env, problem, sample, context)
        try:
            return walk.played(await walk.run(context.episodes))
        except EpisodeLost:
            continue
    return walk.played(Score(0.0, f"its process or its generator was lost {_MAX_LOST} times", cause="lost"))


class _Walk:
    def __init__(self, env: "ChatEnv", problem: Problem, sample: int, context: RolloutContext):
        seeds = [derive_seed(context.params.seed, sample, turn) % 2**32 for turn in range(env.max_turns)]
        template = chat_template(context.tokenizer, env.call_format)
        self._session = ChatSession(template, context.sampler, context.params, seeds, context.max_tokens)
        self._env = env
        self._problem = problem
        self._seed = derive_seed(context.params.seed, "episode", sample)
        self._messages: list[Message] = []
        self._num_opening = 0
        self._tool_results: list[ToolResult] = []
        self._counts: Counter[str] = Counter()
        self._stop = StopReason.STOP
        self._began = time.monotonic()

    async def run(self, episodes: Episodes) -> Score:
        """Raises EpisodeLost where it failed and its generator had died: the wait is not its failure."""
        seconds = self._env.episode_seconds
        try:
            async with episodes.open(self._problem, self._seed) as process, within(seconds):
                score = await self._talk(process)
        except TooLong as error:
            score = Score(0.0, str(error), cause="too_long")
        except Unwritable as error:
            score = Score(0.0, str(error), cause="template")
        except TimeoutError:
            problem = f"the episode took over {seconds:g} s (env.episode_seconds)"
            score = Score(0.0, problem, cause="timeout")
        except EpisodeFailed as failure:
            score = Score(0.0, str(failure), cause=failure.cause)
        if is_policys(score.cause) and self._session.outages:
            raise EpisodeLost(self._session.outages[-1])
        return score

    async def _talk(self, process: EpisodeProcess) -> Score:
        opening = await process.begin()
        self._messages += opening.messages
        self._num_opening = len(self._messages)
        while True:
            try:
                turn = await self._session.complete(self._messages, opening.tools)
            except TooLong:
                if not self._session.turns:
                    raise
                return await self._cut_off(process)
            self._messages.append(turn.message)
            if not turn.is_complete:
                return await self._cut_off(process, turn)
            reply = await process.step(turn.told, turn.parsed.malformed, turn.completion.tokens.tolist())
            self._counts.update(reply.counts)
            self._messages += reply.messages
            self._tool_results += reply.tool_results
            if reply.score is not None:
                return reply.score
            if not self._session.num_turns_left:
                return await self._cut_off(process)

    async def _cut_off(self, process: EpisodeProcess, *unanswered: Turn) -> Score:
        self._stop = StopReason.LENGTH
        told = [turn.told for turn in unanswered]
        return await process.score(self._stop, told, _tokens(unanswered), _texts(unanswered))

    def played(self, score: Score) -> _Played:
        turns = self._session.turns
        end = EndedEpisode(
            tuple(self._messages), self._stop, _tokens(turns), _texts(turns), [t.written for t in turns],
            self._num_opening, tuple(self._tool_results), score.notes,
        )  # fmt: skip
        return self._rollout(score), end

    def _rollout(self, score: Score) -> Rollout:
        session = self._session
        branches = session.branches or ((Segment.unsampled([]),),)
        turns = session.turns
        score = check_parts(score, [len(turn.completion.tokens) for turn in turns])
        if not turns and is_policys(score.cause):
            score = replace(score, cause="start")
        return Rollout(
            problem=self._problem,
            segments=branches[0],
            response=turns[-1].text if turns else "",
            stop=self._stop,
            versions=session.versions,
            forks=branches[1:],
            turn_order=session.turn_order,
            messages=tuple(self._messages),
            score=score,
            counts={"turns": len(turns), "tool_calls": 0, **self._counts},
            seconds=time.monotonic() - self._began,
        )


class _AgentWalk(_Walk):
    def __init__(self, *walk: Any, door: Door):
        super().__init__(*walk)
        self._door = door

    async def _talk(self, process: EpisodeProcess) -> Score:
        gave_up: EpisodeFailed | None = None
        base_url, key = await self._door.enter(self._session)
        try:
            await process.act(base_url, key)
        except EpisodeFailed as failure:
            # An agent that gives up as its budget is used up has come to its end; any other has failed.
            if not self._session.was_refused or failure.cause != "raised":
                raise
            gave_up = failure
        finally:
            self._messages += await self._door.leave(key)
            turns = self._session.turns
            self._counts["tool_calls"] = sum(len(turn.parsed.calls) for turn in turns)
            if self._session.is_refused or any(not turn.is_complete for turn in turns[-1:]):
                self._stop = StopReason.LENGTH
        if self._session.was_refused and not turns:
            raise TooLong(
                str(gave_up or "the agent's first request leaves no room for an answer (max_seq_len)")
            )
        try:
            return await process.score(self._stop, self._messages, _tokens(turns), _texts(turns))
        except EpisodeFailed as failure:
            # A reward that misses what an agent that gave up did not leave fails for the agent's reason.
            raise (gave_up if gave_up and is_policys(failure.cause) else failure) from None


def _tokens(turns: Sequence[Turn]) -> list[list[int]]:
    return [turn.completion.tokens.tolist() for turn in turns]


def _texts(turns: Sequence[Turn]) -> list[str]:
    return [turn.text for turn in turns]


def chat_template(tokenizer: Tokenizer, call_format: str) -> ChatTemplate:
    """Of a tokenizer and env.call_format. Raises ConfigError where the template is no good."""
    return _made(tokenizer, call_format)  # type: ignore[arg-type]  # a tokenizer is hashable by identity


@lru_cache(maxsize=8)
def _made(tokenizer: Hashable, call_format: Any) -> ChatTemplate:
    return ChatTemplate(cast(Tokenizer, tokenizer), None if call_format == "auto" else call_format)
