"""Retention: what nobody uses any more goes, a few rows at a time, so that no client waits for it."""

import asyncio
import inspect
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.engine import Row

from rl.tinker.checkpoints import Checkpoints
from rl.tinker.connection import Unavailable
from rl.tinker.database import Database, checkpoints, models, now, requests, sessions
from rl.tinker.limits import Limits
from rl.tinker.paths import directory_name
from rl.tinker.quotas import Quotas
from rl.tinker.requests import Requests
from rl.tinker.room import GONE, ROW_ALONE

_SWEEP_SECONDS = 60.0
_PIECE = 100
_SHARE = 0.25  # of the process's time, at most
_HAS_CHECKPOINTS = select(checkpoints.c.path).where(checkpoints.c.model == models.c.id).exists()
_log = logging.getLogger(__name__)


class Retention:
    """Owns the end of sessions and models.

    A session without a heartbeat for `keep_seconds` is over: its samplers go, once. Its row goes when it has
    no models. A model that had no request for `keep_models_seconds` cannot be used from that moment on, so
    that it may go in pieces: its requests, its directory, its row; the row stays while it has checkpoints.
    """

    def __init__(
        self,
        database: Database,
        queue: Requests,
        checkpoints: Checkpoints,
        quotas: Quotas,
        is_loaded: Callable[[str], bool],
        root: Path,
        limits: Limits,
    ):
        """is_loaded: whether a model is in the engine; it stays until another takes its place there."""
        self._database = database
        self._queue = queue
        self._checkpoints = checkpoints
        self._quotas = quotas
        self._is_loaded = is_loaded
        self._root = root
        self._limits = limits
        self._swept_until = (0.0, "")  # of the last session that `_delete_sessions` looked at

    def oldest_use(self) -> float:
        """A model that was used before cannot be used any more."""
        return max(now() - self._limits.keep_models_seconds, ROW_ALONE + 2)

    def use(self, model: Row) -> None:
        """It has a request. (To the minute: a commit for each would be a third of all.)"""
        if model.seen < now() - min(_SWEEP_SECONDS, self._limits.keep_models_seconds / 10):
            self._database.update(models, models.c.id == model.id, seen=now())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                await self.sweep()
            except Unavailable as error:
                _log.warning("the sweep ended early: %s", error)

    async def sweep(self) -> None:
        before = now() - self._limits.keep_seconds
        await self._all(self._checkpoints.sweep)
        await self._all(lambda: self._queue.forget_before(before))
        await self._all(lambda: self._end_sessions(before))
        await self._all(lambda: self._delete_sessions(before))
        unused = models.c.seen < self.oldest_use(), (models.c.seen >= GONE) | ~_HAS_CHECKPOINTS
        for model in self._database.find(models, *unused, order=models.c.seen, limit=_PIECE):
            await self._delete_model(model.id)

    async def _all(self, piece: Callable[[], bool | Awaitable[bool]]) -> None:
        """Pieces until one was the last. Between them the event loop is others'."""
        while True:
            began = time.monotonic()
            more = piece()
            if inspect.isawaitable(more):
                more = await more
            await asyncio.sleep((time.monotonic() - began) * (1 / _SHARE - 1))
            if not more:
                return

    async def end(self, rows: Sequence[Row]) -> None:
        """Sessions: their samplers go. They end once those are gone: a restart in between repeats it."""
        await self._checkpoints.drop_samplers(rows)
        self._database.update(sessions, sessions.c.id.in_([row.id for row in rows]), ended=now())

    async def _end_sessions(self, before: float) -> bool:
        unseen = sessions.c.ended.is_(None), sessions.c.seen < before
        rows = self._database.find(sessions, *unseen, order=sessions.c.seen, limit=_PIECE)
        if rows:
            await self.end(rows)
        return len(rows) == _PIECE

    def _delete_sessions(self, before: float) -> bool:
        """Those without models. Those with models are looked at once in a life of the server."""
        by_end = sessions.c.ended, sessions.c.id
        where = tuple_(*by_end) > self._swept_until, sessions.c.ended < before
        rows = self._database.find(sessions, *where, order=by_end, limit=_PIECE)
        if rows:
            self._database.delete(
                sessions,
                sessions.c.id.in_([row.id for row in rows]),
                ~select(models.c.id)
                .where(models.c.session == sessions.c.id, models.c.seen > ROW_ALONE)
                .exists(),
            )
            self._swept_until = rows[-1].ended, rows[-1].id
        return len(rows) == _PIECE

    def was_run(self) -> ColumnElement[bool]:
        """Of models that are in use, and of those with checkpoints: training runs, as Tinker calls them."""
        return (models.c.seen >= self.oldest_use()) | _HAS_CHECKPOINTS

    async def _delete_model(self, id: str) -> None:
        """Its row stays as long as there are checkpoints of it."""
        model = self._database.get(models, id)
        if model is None:
            return
        waiting = requests.c.target == model.id, requests.c.state == "waiting"
        if self._is_loaded(model.id) or self._database.find(requests, *waiting, limit=1):
            return
        # Whatever the setting is after a restart.
        self._database.update(models, models.c.id == model.id, seen=min(model.seen, GONE))
        await self._all(lambda: self._queue.forget_target(model.id))
        directory = self._root / "models" / directory_name(model.id)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        own, of_session = models.c.id == model.id, models.c.session == model.session
        others = select(models.c.id).where(of_session, ~own, models.c.seen > ROW_ALONE).exists()
        end: Any = models.delete().where(own)
        if self._database.find(checkpoints, checkpoints.c.model == model.id, limit=1):
            end = models.update().where(own).values(seen=ROW_ALONE, snapshot=None, snapshot_bytes=0)
        is_over = sessions.c.id == model.session, sessions.c.ended.is_not(None)
        self._database.change(end, sessions.delete().where(*is_over, ~others))
        self._quotas.add(model.tenant, -(model.snapshot_bytes or 0))
