"""RolloutBuffer: the owner of every prompt on its way, and of how far it may lag behind the policy.

A prompt has an index, from which its problem and its seeds follow. `served` is the newest version that a
generator serves, P the groups of each step, and k = max_offpolicy_steps:

1. Each index is started once and ends once: trained on, filtered, or failed.
2. A prompt starts only while (k + served + 1) * P - those that were started and not filtered > 0.
3. A group begun at version v is trained on at version v + k at the latest. 2. alone does not give that:
   groups that are finished early could take the places of older ones. So a batch is what is finished, the
   oldest first, unless those that are left could then no longer all be in time; in that case it waits for the
   older ones.
4. Nothing that is finished is thrown away, but what the filter takes out.

A batch may be taken in parts. With k = 0 these follow the order of indices, whatever is finished first, so
that a run repeats itself.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from rl.config.learning import Pace
from rl.errors import RunError
from rl.types import Group, PolicyVersion
from rl.waiting import Signal


@dataclass(frozen=True)
class Taken:
    """What a step gets."""

    groups: tuple[Group, ...]  # in the order of their indices
    filtered: tuple[Group, ...]  # since the batch before


@dataclass(frozen=True, slots=True)
class _Prompt:
    index: int
    begun: PolicyVersion


@dataclass(frozen=True, slots=True)
class Finished(_Prompt):
    group: Group


@dataclass(frozen=True)
class BufferState:
    """What a run goes on with."""

    next: int  # the index of the prompt that comes next
    unfinished: list[int]  # those that were started and have not ended
    held: list[Finished] = field(default_factory=list)  # those of them that are finished


class RolloutBuffer:
    """`generate(index, version)` makes the group of a prompt, with weights of at least that version."""

    def __init__(
        self,
        generate: Callable[[int, PolicyVersion], Awaitable[Group]],
        pace: Pace,
        keep: Callable[[Group], bool],
        *,
        num_steps_done: int = 0,
        state: BufferState | None = None,
    ):
        """keep: whether a group is worth a place in a batch; others are filtered, within the pace's bound.

        state: what `state` gave when a checkpoint was written. Prompts that had not ended are started again,
        but for those that were finished and may still be trained on.
        """
        self._generate = generate
        self._pace = pace
        self._keep = keep
        self._served: PolicyVersion | None = None
        self._num_taken = num_steps_done * pace.groups_per_step
        self._next = state.next if state else self._num_taken
        self._running: dict[int, _Prompt] = {}
        self._running_since: Counter[PolicyVersion] = Counter()
        self._finished: dict[int, Finished] = {}
        self._in_step: list[Finished] = []  # what the step that was taken last consists of, filtered too
        self._spare: list[Finished] = []  # finished since the batch before, and not worth a place
        self._tasks: set[asyncio.Task] = set()
        self._failure: Exception | None = None
        self._is_closed = False
        self._changed = Signal()
        self.ends: Counter[str] = Counter()
        self._again: list[int] = []  # started before, and to be started again
        if state is not None:
            self._restore(state, num_steps_done)

    def _restore(self, state: BufferState, version: PolicyVersion) -> None:
        """Take up what was held, the oldest first, while there are places in time; the others start again.

        The pace may be another than it was, and a step that is taken again brings back what it had filtered.
        """
        pace = self._pace
        in_time = [p for p in state.held if p.begun + pace.max_offpolicy_steps >= version]
        for prompt in sorted(in_time, key=lambda p: (p.begun, p.index)):
            last_version = prompt.begun + pace.max_offpolicy_steps
            places = (last_version - version + 1) * pace.groups_per_step
            num_spare = max(0, len(self._spare) - pace.max_filtered_per_step)
            has_place = len(self._finished) + num_spare < places  # all that have one are due by then
            if self._is_kept(prompt.group):
                if has_place:
                    self._finished[prompt.index] = prompt
            elif has_place or len(self._spare) < pace.max_filtered_per_step:
                self._spare.append(prompt)
        held = {*self._finished, *(p.index for p in self._spare)}
        self._again = [index for index in state.unfinished if index not in held]

    async def follow(self, served: Callable[[], PolicyVersion | None], changed: Signal) -> None:
        """Start prompts whenever a newer version is served. Never returns.

        What is served falls back, or is nothing, while a generator that died starts again.
        """

        def is_newer() -> bool:
            version = served()
            return version is not None and (self._served is None or version > self._served)

        while True:
            await changed.wait_for(is_newer)
            self._served = served()
            self._start()

    async def take(self, version: PolicyVersion, size: int | None = None) -> Taken:
        """The groups of the step that is trained at `version`, or `size` more of them.

        Waits until they are there. Parts of a step need a pace without a filter.
        """
        size = size or self._pace.groups_per_step
        await self._changed.wait_for(lambda: self._failure is not None or self._can_take(version, size))
        if self._failure is not None:
            raise self._failure
        chosen = self._choose(version, size)
        assert chosen is not None  # as _can_take said
        if self._num_taken % self._pace.groups_per_step == 0:
            self._in_step = []
        kept, filtered = self._split_spare()
        self._spare = []
        self._finished |= {prompt.index: prompt for prompt in kept}
        self.ends["filtered"] += len(filtered)
        for prompt in chosen:
            del self._finished[prompt.index]
            failed = all(score.is_dropped for score in prompt.group.scores)
            self.ends["failed" if failed else "trained on"] += 1
        self._num_taken += len(chosen)
        self._in_step += [*chosen, *filtered]
        self._start()
        return Taken(tuple(p.group for p in chosen), tuple(p.group for p in filtered))

    @property
    def state(self) -> BufferState:
        """For a checkpoint: the prompts that have not ended."""
        return self._state([])

    @property
    def state_before_step(self) -> BufferState:
        """The same, as if the step that was taken last had not begun."""
        return self._state(self._in_step)

    def _state(self, taken: list[Finished]) -> BufferState:
        """A group whose rewards all failed is not held: who resumes may have mended what they failed of."""
        ended = [*self._finished.values(), *self._spare, *taken]
        unfinished = sorted([*self._again, *self._running, *(prompt.index for prompt in ended)])
        held = [p for p in ended if not all(score.error for score in p.group.scores)]
        return BufferState(self._next, unfinished, held)

    @property
    def coming(self) -> range:
        """The indices that the next step is likely to start."""
        return range(self._next, self._next + self._pace.groups_per_step)

    @property
    def metrics(self) -> dict[str, float]:
        return {"buffer/running": len(self._running), "buffer/finished": len(self._finished)}

    def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()

    def _start(self) -> None:
        """As many prompts as the pace allows."""
        pace = self._pace
        ahead = (pace.max_offpolicy_steps + (self._served or 0) + 1) * pace.groups_per_step
        limit = min(ahead, pace.num_steps * pace.groups_per_step)
        while self._served is not None and self._num_started < limit:
            if self._again:
                index = self._again.pop(0)
            else:
                index, self._next = self._next, self._next + 1
            self._running[index] = _Prompt(index, self._served)
            self._running_since[self._served] += 1
            task = asyncio.create_task(self._run(self._running[index]))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, index))

    @property
    def _num_started(self) -> int:
        """Without those that were filtered."""
        return self._num_taken + len(self._running) + len(self._finished) + len(self._split_spare()[0])

    def _split_spare(self) -> tuple[list[Finished], list[Finished]]:
        """Those that take a place after all, as the filter's bound is reached; and those that are filtered.

        The oldest are filtered: they made way for newer ones, and there would be no place for both in time.
        """
        in_order = sorted(self._spare, key=lambda p: (-p.begun, p.index))
        num_kept = max(0, len(in_order) - self._pace.max_filtered_per_step)
        return in_order[:num_kept], sorted(in_order[num_kept:], key=lambda p: p.index)

    async def _run(self, prompt: _Prompt) -> None:
        group = await self._generate(prompt.index, prompt.begun)
        del self._running[prompt.index]
        self._running_since -= Counter([prompt.begun])  # keeps no zeros
        finished = Finished(prompt.index, prompt.begun, group)
        if self._is_kept(group):
            self._finished[prompt.index] = finished
        else:
            self._spare.append(finished)
            self._start()
        self._changed.notify()

    def _ended(self, index: int, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if not self._is_closed:
                why = "its environment cancels it, or a library of that: let no CancelledError out"
                self._fail(RunError(f"prompt {index} was cancelled before its end; {why}"))
        elif isinstance(error := task.exception(), Exception):
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends the run: whoever takes the next batch hears of it."""
        self._failure = self._failure or error
        self._changed.notify()

    def _is_kept(self, group: Group) -> bool:
        """Whether it is worth a place."""
        return self._keep(group) or not self._pace.max_filtered_per_step

    def _can_take(self, version: PolicyVersion, size: int) -> bool:
        return self._choose(version, size) is not None

    def _choose(self, version: PolicyVersion, size: int) -> list[Finished] | None:
        """The next part of the batch of the step at `version`, or None while it has to wait.

        For every later version u: those due by then and not chosen must fit into the steps until then, and
        what is left of this one.
        """
        pace, k = self._pace, self._pace.max_offpolicy_steps
        num_spare = max(0, len(self._spare) - pace.max_filtered_per_step)
        if len(self._finished) + num_spare < size:
            return None
        places = -(self._num_taken + size) % pace.groups_per_step

        def is_in_time(left: Mapping[PolicyVersion, int]) -> bool:
            due = 0
            for last_version in sorted(left):
                due += left[last_version]
                if due > places + (last_version - version) * pace.groups_per_step:
                    return False
            return True

        left = Counter({begun + k: number for begun, number in self._running_since.items()})
        if not is_in_time(left):  # asked first: it costs nothing, and the sort below does
            return None
        finished = [*self._finished.values(), *self._split_spare()[0]]
        oldest_first = sorted(finished, key=lambda p: (p.begun, p.index))
        chosen, remaining = oldest_first[:size], oldest_first[size:]
        if not k and any(i < chosen[-1].index for i in self._running):
            return None
        left.update(p.begun + k for p in remaining)
        return sorted(chosen, key=lambda p: p.index) if is_in_time(left) else None
