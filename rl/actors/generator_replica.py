"""GeneratorReplica: a generator that can be spawned again, and that follows the weight store."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rl.actors.member import GeneratorMember, Visitor
from rl.actors.remote import ProcessDied, quietly
from rl.actors.replica import Replica, State
from rl.actors.turns import Turns
from rl.errors import WeightsUnreachable
from rl.models.generator.wave import Wave
from rl.types import Completion, PolicyVersion, SamplingParams, UpdateMode
from rl.waiting import Signal
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore

_SLACK_SECONDS = 0.1
_TRY_SECONDS = 2.0
_UNREACHABLE_SECONDS = 900.0  # a lost host has deadlines.start to come back, then weights are published anew
_log = logging.getLogger(__name__)


class Updates:
    """Which version the generators should have: the newest of the policy, or the one that is pinned.

    Those that load a version at the same time begin to serve it together: prompts that wait for it would
    otherwise all go to the fastest. One that takes more than twice as long as another is not waited for.
    """

    def __init__(self, store: WeightStore, policy: str):
        """policy: the name under which what is sampled is published."""
        self.store = store
        self.pinned: Manifest | None = None
        self.policy = policy
        self.epoch = 0  # how often all versions so far were forgotten
        self._loading: dict[PolicyVersion, int] = {}
        self._loaded: dict[PolicyVersion, asyncio.Event] = {}  # by all that load it

    @property
    def newest(self) -> Manifest | None:
        return self.store.newest(self.policy)

    @property
    def wanted(self) -> Manifest | None:
        return self.pinned or self.newest

    @asynccontextmanager
    async def together(self, version: PolicyVersion) -> AsyncIterator[None]:
        """Within the context the version is loaded; it is left when the others have it too."""
        began = time.monotonic()
        self._loading[version] = self._loading.get(version, 0) + 1
        all_have_it = self._loaded.setdefault(version, asyncio.Event())
        try:
            yield
        finally:
            self._loading[version] -= 1
            if not self._loading[version]:
                del self._loading[version], self._loaded[version]
                all_have_it.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(time.monotonic() - began + _SLACK_SECONDS):
                await all_have_it.wait()


class _Request:
    """One that waits for its turn to end, and then for its completions."""

    def __init__(self, key: int, prompt: Sequence[int], n: int, params: SamplingParams):
        self.key, self.prompt, self.n, self.params = key, prompt, n, params
        self.is_sent = False
        self.answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()

    def finish(self, sampled: asyncio.Task[list[Completion]]) -> None:
        if sampled.cancelled():
            self.answer.cancel()
        elif (error := sampled.exception()) and not self.answer.done():
            self.answer.set_exception(error)
        elif not self.answer.done():
            self.answer.set_result(sampled.result())


@dataclass
class _OpenWave:
    member: GeneratorMember
    requests: list[_Request] = field(default_factory=list)


class GeneratorReplica(Replica[GeneratorMember]):
    """A generator that can be spawned again, and that follows the WeightStore.

    Invariants: it serves only once it has the weights of some version, with `version` their number; and it is
    on its devices only while it may be. Where it drains, it finishes what it has before it takes new weights.
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[GeneratorMember]],
        max_restarts: int,
        update_mode: UpdateMode,
        updates: Updates,
        changed: Signal,
        turns: Turns | None = None,
        host: Visitor | None = None,
    ):
        """turns: None: it may always be on its devices."""
        super().__init__(name, self._spawn_in_turn, max_restarts, changed, host)
        self._spawn_now = spawn
        self._turns = turns
        self.version: PolicyVersion | None = None
        self._update_mode = update_mode
        self._updates = updates
        self._wave_numbers = count()
        self._keys = count()
        self._wave: _OpenWave | None = None  # of the present turn of the event loop
        self._given_up: list[int] = []  # keys of requests of the present turn that nobody waits for any more
        self._sent: set[asyncio.Task[Any]] = set()

    async def serve(self, member: GeneratorMember) -> None:
        self.version = None
        self._enter(State.LOADING)
        epoch, began = self._updates.epoch, None
        while True:
            await self._updates.store.changed.wait_for(lambda: not self._may_stay() or self._is_behind())
            if not self._may_stay():
                await self._leave(member)
                epoch = self._updates.epoch
                continue
            if self.state == State.SERVING and self._update_mode == "drain":
                await self._drain()
            if epoch != self._updates.epoch:
                epoch = self._updates.epoch
                await member.give_up_samples()
            manifest = self._updates.wanted
            if manifest is None:  # forgotten meanwhile
                continue
            try:
                loaded = await self._take(member, manifest)
            except WeightsUnreachable as error:
                began = await self._try_later(error, began)
                continue
            began = None
            if loaded is None or epoch != self._updates.epoch:
                continue
            self.version = loaded.version
            self._enter(State.SERVING)

    async def _take(self, member: GeneratorMember, manifest: Manifest) -> Manifest | None:
        """What was loaded: this version, or a newer one; None where all are forgotten meanwhile."""
        async with self._updates.together(manifest.version):
            if self.version is None and manifest.adapter is not None:
                model = self._updates.store.newest(MODEL)
                if model is None:
                    return None
                await self._load(member, model)
                newest = self._updates.wanted  # the one before may be freed by now
                if newest is None:
                    return None
                manifest = newest
            await self._load(member, manifest)
        return manifest

    async def _try_later(self, error: WeightsUnreachable, began: float | None) -> float:
        """When it first failed, with `began` None for now. Raises ProcessDied where that is too long ago."""
        now = time.monotonic()
        if began is None:
            _log.warning("%s: %s; it waits for a version that can be reached", self.name, error)
        elif now - began > _UNREACHABLE_SECONDS:
            raise ProcessDied(
                f"{self.name} reached no version of the weights for {_UNREACHABLE_SECONDS:.0f} s: {error}"
            ) from error
        await asyncio.sleep(_TRY_SECONDS)
        return now if began is None else began

    def _may_stay(self) -> bool:
        return self._turns is None or self._turns.may_stay(self.name)

    def _left(self) -> None:
        if self._turns is not None:
            self._turns.left(self.name)

    async def _drain(self) -> None:
        """Finish what it has, and take no more."""
        if self.state == State.SERVING:
            self._enter(State.DRAINING)
        await self._changed.wait_for(lambda: self.load == 0)

    async def _leave(self, member: GeneratorMember) -> None:
        """Until it may be there again: then it has no weights."""
        assert self._turns is not None
        await self._drain()
        self.version = None
        await member.suspend()
        self._enter(State.SUSPENDED)
        self._turns.left(self.name)
        await self._turns.come(self.name)
        self._enter(State.LOADING)

    async def _spawn_in_turn(self) -> GeneratorMember:
        if self._turns is not None:
            if not self._may_stay():
                self._enter(State.SUSPENDED)
            await self._turns.come(self.name)
            self._enter(State.STARTING)
        try:
            return await self._spawn_now()
        except BaseException:
            self._left()
            raise

    async def _live(self, member: GeneratorMember) -> ProcessDied:
        try:
            return await super()._live(member)
        finally:
            self._left()

    def forget(self) -> None:
        """What it has is no version any more. It serves nothing until it has loaded another."""
        self.version = None
        if self.state in (State.SERVING, State.DRAINING):
            self._enter(State.LOADING)

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        """Requests made in one turn of the event loop are admitted together, in this order: see Wave."""
        request = _Request(next(self._keys), prompt, n, params)
        return await self.ask(lambda member: self._in_wave(member, request), load=n)

    async def _in_wave(self, member: GeneratorMember, request: "_Request") -> list[Completion]:
        if self._wave is None or self._wave.member is not member:
            self._wave = _OpenWave(member)
            asyncio.get_running_loop().call_soon(self._close_wave, self._wave)
        self._wave.requests.append(request)
        try:
            return await request.answer
        except asyncio.CancelledError:
            if request.is_sent:
                self._give_up(member, request.key)
            raise

    def _give_up(self, member: GeneratorMember, key: int) -> None:
        """The generator ends what nobody waits for. One message for all of a turn of the event loop."""
        if not self._given_up:
            asyncio.get_running_loop().call_soon(self._send_given_up, member)
        self._given_up.append(key)

    def _send_given_up(self, member: GeneratorMember) -> None:
        keys, self._given_up = self._given_up, []
        if member is self._member:  # a dead one samples nothing
            self._keep(asyncio.create_task(quietly(member.give_up_samples(keys))))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    def _close_wave(self, wave: "_OpenWave") -> None:
        """Send the requests that somebody still waits for."""
        self._wave = None if self._wave is wave else self._wave
        waiting = [request for request in wave.requests if not request.answer.done()]
        number, size = next(self._wave_numbers), len(waiting)
        for position, request in enumerate(waiting):
            place = Wave(number, position, size)
            sampling = wave.member.sample(request.prompt, request.n, request.params, place, request.key)
            task = asyncio.create_task(sampling)
            request.is_sent = True
            self._keep(task)
            task.add_done_callback(request.finish)

    def _is_behind(self) -> bool:
        wanted = self._updates.wanted
        return wanted is not None and wanted.version != self.version

    async def _load(self, member: GeneratorMember, manifest: Manifest) -> None:
        async with self._updates.store.reading(manifest):
            await member.load_weights(manifest)
