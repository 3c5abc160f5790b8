"""ChatSession: one episode's conversation with the policy, as a tree of tokens.

Whoever talks, our own turn loop or an agent over HTTP, sends the whole conversation each time, as OpenAI's
API has it. What the session has sampled it knows again by its message, and goes on after its tokens: no
sampled turn is tokenised again. A conversation that was rewritten begins a new branch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl.causes import noting_outages
from rl.envs.base import no_room
from rl.envs.chat.template import ChatTemplate, Schema, for_template
from rl.envs.chat.tool_calls import ParsedTurn, as_message
from rl.errors import ConfigError
from rl.interfaces import Sampler
from rl.sequences import lay_out
from rl.types import Completion, Message, SamplingParams, Segment, StopReason, VersionRange


class TooLong(Exception):
    """A prompt leaves no room for an answer."""


class Unwritable(Exception):
    """The model's chat template does not take the conversation."""


class NoTurnsLeft(Exception):
    """The episode's turns are used up."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of the policy, equal to itself alone. `before`: the turn whose tokens it goes on after."""

    before: "Turn | None"
    new_tokens: np.ndarray  # int32, since `before`, or the whole prompt
    completion: Completion
    message: Message
    parsed: ParsedTurn  # of a turn that was cut off: its text alone
    written: str  # all that the policy wrote, reasoning and calls as they stand
    keys: tuple[str, ...] = ()  # of the conversation that it ends: with its message, and with what it wrote

    @property
    def told(self) -> Message:
        """For the episode's process: the message, and `text`, which is no part of it."""
        return {**self.message, "text": self.written}

    @property
    def text(self) -> str:
        return str(self.message["content"])

    @property
    def is_complete(self) -> bool:
        return self.completion.stop is StopReason.STOP

    @property
    def path(self) -> "list[Turn]":
        """From the first turn of its conversation to this one."""
        turns = [self]
        while turns[-1].before is not None:
            turns.append(turns[-1].before)
        return turns[::-1]

    @property
    def tokens(self) -> list[int]:
        """The whole sequence up to its end."""
        tokens: list[int] = []
        for turn in self.path:
            tokens += turn.new_tokens.tolist()
            tokens += turn.completion.tokens.tolist()
        return tokens


class ChatSession:
    """Draws one rollout. `turns` are all of the policy's, in the order of their completion."""

    def __init__(
        self,
        template: ChatTemplate,
        sampler: Sampler,
        params: SamplingParams,
        seeds: Sequence[int],
        max_tokens: int,
    ):
        """params: of each turn, but for the seed. seeds: one for each turn. max_tokens: of a sequence."""
        self.turns: list[Turn] = []
        self.outages: list[str] = []  # generators that died while a turn was sampled
        self.was_refused = False  # a turn that its budgets do not allow was asked for
        self.is_refused = False  # the last one that was
        self._template = template
        self._sampler = sampler
        self._params = replace(params, stop_token_ids=_with(params.stop_token_ids, template.end_id))
        self._seeds = seeds
        self._max_tokens = max_tokens
        self._known: dict[str, Turn] = {}  # a conversation's key -> the turn that ends it
        self._num_begun = 0

    async def complete(self, messages: Sequence[Message], tools: Sequence[Schema]) -> Turn:
        """The policy's next turn, which whoever asks has got. Raises as `sample`."""
        turn = await self.sample(messages, tools)
        self.deliver(turn)
        return turn

    def deliver(self, turn: Turn) -> None:
        """Whoever asked for it has got it: conversations go on after it."""
        if turn.is_complete:
            self._known |= dict.fromkeys(turn.keys, turn)

    async def sample(
        self, messages: Sequence[Message], tools: Sequence[Schema], max_new_tokens: int | None = None
    ) -> Turn:
        """The policy's next turn. Raises NoTurnsLeft, Unwritable, or TooLong where there is no room for it.

        max_new_tokens: where it is to be shorter than others.
        """
        if not self.num_turns_left:
            self.was_refused = self.is_refused = True
            raise NoTurnsLeft("the episode's turns are used up (env.max_turns)")
        before, new = self._find(messages, tools)
        try:
            new_tokens = (
                self._template.continuation(new, tools) if before else self._template.prompt(messages, tools)
            )
        except ConfigError as error:
            raise Unwritable(str(error)) from error
        prompt = [*(before.tokens if before else ()), *new_tokens]
        room = self._max_tokens - len(prompt)
        self.is_refused = room < 1
        if self.is_refused:
            self.was_refused = True
            raise TooLong(no_room("conversation", len(prompt), self._max_tokens))
        seed = self._seeds[self._num_begun]
        self._num_begun += 1
        limit = min(self._params.max_new_tokens, room, max_new_tokens or room)
        params = replace(self._params, max_new_tokens=limit, seed=seed)
        with noting_outages(self.outages):
            completion = (await self._sampler.sample(prompt, 1, params))[0]
        turn = self._turn(before, new_tokens, completion, messages, tools)
        self.turns.append(turn)
        return turn

    @property
    def num_turns_left(self) -> int:
        return len(self._seeds) - self._num_begun

    @property
    def branches(self) -> tuple[tuple[Segment, ...], ...]:
        """Every sequence that was sampled, each turn's tokens sampled in one of them and given in others."""
        trained: set[int] = set()
        return tuple(lay_out(_segments(turn, trained)) for turn in self._leaves)

    @property
    def turn_order(self) -> tuple[int, ...]:
        """See Rollout."""
        of_branches = dict.fromkeys(id(step) for turn in self._leaves for step in turn.path)
        places = {turn: place for place, turn in enumerate(of_branches)}
        order = tuple(places[id(turn)] for turn in self.turns)
        return () if order == tuple(range(len(order))) else order

    @property
    def _leaves(self) -> list[Turn]:
        """The turns after which no other goes on."""
        inner = {id(turn.before) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in inner]

    @property
    def versions(self) -> VersionRange | None:
        """Of all turns."""
        versions = [turn.completion.versions for turn in self.turns]
        if not versions:
            return None
        return VersionRange(min(v.oldest for v in versions), max(v.newest for v in versions))

    def forget(self, turn: Turn) -> None:
        """Nobody got this turn: it is not learned from."""
        self.turns.remove(turn)

    def as_told(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[Message]:
        """The conversation with each known turn by its own message: a client may send what was written."""
        own = list(messages)
        for end, message in enumerate(messages, 1):
            if message["role"] == "assistant" and (turn := self._known.get(_key(messages[:end], tools))):
                own[end - 1] = turn.message
        return own

    def _find(
        self, messages: Sequence[Message], tools: Sequence[Schema]
    ) -> tuple[Turn | None, Sequence[Message]]:
        """The longest conversation that is known, and what follows it."""
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1]["role"] != "assistant" or messages[end]["role"] == "assistant":
                continue
            if (turn := self._known.get(_key(messages[:end], tools))) is not None:
                return turn, messages[end:]
        return None, messages

    def _turn(
        self,
        before: Turn | None,
        new_tokens: Sequence[int],
        completion: Completion,
        messages: Sequence[Message],
        tools: Sequence[Schema],
    ) -> Turn:
        text = self._template.text(completion.tokens.tolist())
        if completion.stop is StopReason.STOP:
            parsed = self._template.parse(text, bool(tools))
            message = as_message(parsed, text, f"call{len(self.turns):03d}")
        else:
            parsed, message = ParsedTurn(text), {"role": "assistant", "content": text}
        verbatim: Message = {"role": "assistant", "content": text}
        keys = tuple(_key([*messages, last], tools) for last in (message, verbatim))
        return Turn(before, np.array(new_tokens, np.int32), completion, message, parsed, text, keys)


def _segments(turn: Turn, trained: set[int]) -> tuple[Segment, ...]:
    """From the beginning to this turn. trained: the turns that are sampled in an earlier branch."""
    segments: list[Segment] = []
    for step in turn.path:
        completion = step.completion
        segments.append(Segment.unsampled(step.new_tokens))
        if id(step) in trained:
            segments.append(Segment.unsampled(completion.tokens))
        else:
            segments.append(Segment(completion.tokens, True, completion.logprobs))
            trained.add(id(step))
    return tuple(segments)


def _key(messages: Sequence[Message], tools: Sequence[Schema]) -> str:
    """What stays the same when a client sends a conversation back: no ids, no reasoning, no spacing."""
    return json.dumps([*map(_canonical, messages), list(tools)], sort_keys=True, default=str)


def _canonical(message: Message) -> Mapping[str, Any]:
    plain = for_template(message)
    functions = [call["function"] for call in plain.get("tool_calls") or ()]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return {"role": plain["role"], "content": plain["content"].strip(), "calls": calls}


def _with(ids: tuple[int, ...], end: int) -> tuple[int, ...]:
    return ids if end in ids else (*ids, end)
