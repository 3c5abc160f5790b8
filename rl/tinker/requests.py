"""Requests: each that a client has sent, from its arrival until its result has been fetched.

A request's id follows from what the client named it by, so that one that is sent again is the same one. Its
row is committed before the client hears of it, and its result before whoever waits for it.
"""

import asyncio
import contextlib
import json
import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import func, select
from sqlalchemy.engine import Row

from rl.tinker.backend import UserError
from rl.tinker.connection import Unavailable
from rl.tinker.database import Database, check_text, models, now, requests
from rl.tinker.quotas import Quotas

JSON = "application/json"
CHANGES = ("forward_backward", "optim_step", "load_weights")
"""The kinds of request that change a model: it can be restored from them (see Training)."""
COMPUTES = ("forward", "forward_backward")
"""The kinds whose data are a client's: what may end an engine."""
_CURSOR_PER_SECOND = 1_000_000
_MOST_ENDED = 1000
_PIECE = 50  # rows that are deleted in one turn
_REST_SECONDS = 1.0
HEADS = select(*(column for column in requests.c if column.name not in ("body", "result")))
"""Requests without what is large."""
_ANSWERS = select(*(column for column in requests.c if column.name != "body"))
_SIZES = select(
    requests.c.id, requests.c.state, requests.c.finished, func.length(requests.c.result).label("size")
)
Category = Literal["user", "server", "unknown"]
_log = logging.getLogger(__name__)


class TooMany(Exception):
    """A tenant has more requests waiting than it may."""


class Requests:
    """Invariant: a request ends once, as done, failed, or refused (it changed nothing)."""

    def __init__(self, database: Database, max_waiting: int, quotas: Quotas):
        """max_waiting: of one tenant."""
        self._database = database
        self._max_waiting = max_waiting
        self._quotas = quotas
        self._unwritten: deque[tuple[Row, dict[str, Any]]] = deque()  # ends, not in the database yet
        self._writing: asyncio.Task[None] | None = None
        self._taken: set[int] = set()  # numbers of what waits, of which the caller has heard
        self._ended: dict[str, asyncio.Event] = {}  # of those that somebody waits for
        self._ended_of: dict[str, asyncio.Event] = {}  # targets that somebody waits for -> any of theirs
        self._waiting: dict[str, int] = defaultdict(int)  # tenant -> requests
        newest = [self._newest(state, 1) for state in ("done", "failed", "refused")]
        self._newest_end = max((row.finished for rows in newest for row in rows), default=0.0)
        self._open: set[int] = set()  # numbers of what has not ended: an end may still have to be written
        self._running: dict[int, Row] = {}
        for row in self.unfinished():
            self._waiting[row.tenant] += 1
            self._taken.add(row.number)
            self._open.add(row.number)

    def submit(self, id: str, tenant: str, kind: str, target: str, body: bytes) -> tuple[Row, bool]:
        """The request without its body, and whether to carry it out. Raises TooMany; UserError without room.

        One of COMPUTES for which there is no room is refused by its result: it may be a part of a batch, of
        which an SDK that gets an HTTP error sends no more, and waits for its turn for ever.
        """
        row = self._head(id)
        if row is None:
            if self._waiting[tenant] >= self._max_waiting:
                raise TooMany(
                    f"{self._max_waiting} requests are waiting already (limits.max_waiting); wait for their "
                    f"results first"
                )
            refusal = None
            try:
                self._quotas.check(tenant, len(body), target)
            except UserError as error:
                if kind not in COMPUTES:
                    raise
                refusal, body = error, b""
            self._database.insert(
                requests, id=id, tenant=tenant, kind=kind, target=target, body=body, state="waiting",
                created=now(), num_bytes=len(body), deaths=0,
            )  # fmt: skip
            row = self._head(id)
            assert row is not None
            if refusal is not None:
                self._enter(row)
                self.failed(row, str(refusal), "user", refused=True)
                return row, False
        elif row.state != "waiting" or row.number in self._taken:
            return row, False
        self._enter(row)
        return row, True

    def _enter(self, row: Row) -> None:
        self._taken.add(row.number)
        self._open.add(row.number)
        self._quotas.add(row.tenant, row.num_bytes)
        self._waiting[row.tenant] += 1

    def _head(self, id: str) -> Row | None:
        check_text("id", id, 200)
        return next(iter(self._database.rows(HEADS.where(requests.c.id == id))), None)

    def body(self, row: Row) -> bytes:
        """Requests wait without their bodies, of which a tenant may have more than there is memory."""
        ((body,),) = self._database.rows(select(requests.c.body).where(requests.c.number == row.number))
        return body or b""

    def begin(self, row: Row) -> None:
        """It runs from here on: where the server dies before its end, one more death is its own."""
        self._running[row.number] = row
        self._database.update(requests, requests.c.number == row.number, deaths=row.deaths + 1)

    def stop(self) -> None:
        """The server ends in good order: what runs has not ended it."""
        for row in self._running.values():
            self._database.update(requests, requests.c.number == row.number, deaths=row.deaths)
        self._running.clear()

    def done(self, row: Row, result: bytes | Mapping[str, Any], media_type: str = JSON) -> None:
        self._end(
            row, "done", result if isinstance(result, bytes) else json.dumps(result).encode(), media_type
        )

    def failed(self, row: Row, message: str, category: Category, refused: bool = False) -> None:
        """refused: it changed nothing."""
        answer = json.dumps({"error": message, "category": category}).encode()
        self._end(row, "refused" if refused else "failed", answer, JSON)

    def _end(self, row: Row, state: str, result: bytes, media_type: str) -> None:
        """The first end counts: a request may be cancelled twice, or just when it is done."""
        if row.number not in self._open:
            return
        self._open.discard(row.number)
        self._running.pop(row.number, None)
        is_kept = row.kind in CHANGES and state == "done"
        # No two at one moment, also where the clock is set back: `ended_after` counts on it.
        self._newest_end = max(now(), self._newest_end + 2 / _CURSOR_PER_SECOND)
        end = {
            "state": state,
            "result": result,
            "media_type": media_type,
            "finished": self._newest_end,
            "num_bytes": len(result) + (row.num_bytes if is_kept else 0),
        }
        if not is_kept:  # one that failed stays, empty: it has dropped the model's gradient
            end["body"] = b"" if row.kind in CHANGES and state == "failed" else None
        self._unwritten.append((row, end))
        self._write()

    def _write(self) -> None:
        """What has ended, in its order; later what the database does not take now: it is full, or away."""
        while self._unwritten:
            row, end = self._unwritten[0]
            try:
                self._database.update(requests, requests.c.number == row.number, **end)
            except Unavailable as error:
                if self._writing is None:
                    _log.warning("results wait to be written: %s", error)
                    self._writing = asyncio.get_running_loop().create_task(self._write_later())
                return
            self._unwritten.popleft()
            self._quotas.add(row.tenant, end["num_bytes"] - row.num_bytes)
            self._waiting[row.tenant] -= 1
            self._taken.discard(row.number)
            for event in (self._ended.pop(row.id, None), self._ended_of.pop(row.target, None)):
                if event is not None:
                    event.set()

    async def _write_later(self) -> None:
        while self._unwritten:
            await asyncio.sleep(_REST_SECONDS)
            self._write()
        self._writing = None

    async def written(self) -> None:
        """When every result is in the database: until then no model goes on, and no snapshot is named."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def wait(self, id: str, tenant: str, seconds: float) -> Row | None:
        """Its row with the result, or without where it still waits after so long; None where there is none.

        Nothing that is large is held meanwhile: a tenant may poll for one request many times at once.
        """
        row = self._head(id)
        if row is None or row.tenant != tenant:
            return None
        if row.state == "waiting":
            event = self._ended.setdefault(id, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return row
        return next(iter(self._database.rows(_ANSWERS.where(requests.c.id == id))), None)

    async def ended_after(self, target: str, cursor: int, seconds: float) -> list[tuple[int, Row]]:
        """Requests of a model or sampler that ended after the cursor, each with its own cursor, oldest first.

        Rows: id, state, finished, and `size`, the result's bytes. Waits for the first, but no longer than
        so many seconds.
        """
        ended = self._ended_after(target, cursor)
        if not ended and seconds > 0:
            event = self._ended_of.setdefault(target, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
            ended = self._ended_after(target, cursor)
        return ended

    def _ended_after(self, target: str, cursor: int) -> list[tuple[int, Row]]:
        where = (
            requests.c.target == target,
            requests.c.state != "waiting",
            requests.c.finished > (cursor + 0.5) / _CURSOR_PER_SECOND,
        )
        rows = self._database.rows(_SIZES.where(*where).order_by(requests.c.finished).limit(_MOST_ENDED))
        ended = ((round(row.finished * _CURSOR_PER_SECOND), row) for row in rows)
        return [(at, row) for at, row in ended if at > cursor]  # half a microsecond may round away

    def unfinished(self) -> list[Row]:
        """In the order in which they came, without their bodies."""
        waiting = HEADS.where(requests.c.state == "waiting").order_by(requests.c.number)
        return list(self._database.rows(waiting))

    def waiting(self) -> dict[str, int]:
        """Tenant -> requests."""
        return {tenant: count for tenant, count in self._waiting.items() if count}

    def last_failed(self, tenant: str, limit: int) -> list[Row]:
        """The newest first. (An index holds a tenant's, of each state, in this order.)"""
        rows: list[Row] = []
        for state in ("failed", "refused"):
            where = requests.c.tenant == tenant, requests.c.state == state
            rows += self._database.find(requests, *where, order=requests.c.finished.desc(), limit=limit)
        return sorted(rows, key=lambda row: row.finished, reverse=True)[:limit]

    def _newest(self, state: str, limit: int) -> list[Row]:
        """The last that ended in this state. (An index holds a state's in this order.)"""
        newest = requests.c.finished.desc()
        return list(self._database.find(requests, requests.c.state == state, order=newest, limit=limit))

    def keep_snapshot(self, model: Row, number: int, **snapshot: Any) -> None:
        """The model's row names the snapshot after this request, and bodies up to it go: both, or neither."""
        where = (
            requests.c.target == model.id,
            requests.c.number >= model.snapshot_number,  # those before went with the last one
            requests.c.number <= number,
            requests.c.state != "waiting",
            requests.c.body.is_not(None),
        )
        length = func.length(requests.c.body)
        # As it is now: it may have been freed since `model` was read.
        ((kept,),) = self._database.rows(select(models.c.snapshot_bytes).where(models.c.id == model.id))
        ((freed,),) = self._database.rows(select(func.coalesce(func.sum(length), 0)).where(*where))
        self._database.change(
            models.update().where(models.c.id == model.id).values(snapshot_number=number, **snapshot),
            requests.update().where(*where).values(body=None, num_bytes=requests.c.num_bytes - length),
            durable=True,
        )
        self._quotas.add(model.tenant, snapshot["snapshot_bytes"] - (kept or 0) - int(freed))

    def forget_before(self, moment: float) -> bool:
        """A few results that nobody fetched; whether there are more. What a model is restored from stays."""
        return self._forget(requests.c.finished, requests.c.finished < moment, requests.c.body.is_(None))

    def forget_target(self, target: str) -> bool:
        """A few of a model that is gone; whether there are more."""
        return self._forget(requests.c.number, requests.c.target == target)

    def _forget(self, order: Any, *where: Any) -> bool:
        query = select(requests.c.number, requests.c.tenant, requests.c.num_bytes)
        rows = self._database.rows(query.where(*where).order_by(order).limit(_PIECE))
        if rows:
            self._database.delete(requests, requests.c.number.in_([row.number for row in rows]))
        for row in rows:
            self._quotas.add(row.tenant, -row.num_bytes)
        return len(rows) == _PIECE
