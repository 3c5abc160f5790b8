"""Requests: each that a client has sent, from its arrival until its result has been fetched.

A request's id follows from what the client named it by, so that one that is sent again is the same one. Its
row is committed before the client hears of it, and its result before whoever waits for it.
"""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy.engine import Row

from rl.tinker.database import Database, now, requests

JSON = "application/json"
CHANGES = ("forward_backward", "optim_step", "load_weights")
"""The kinds of request that change a model: it can be restored from them (see Training)."""
_CURSOR_PER_SECOND = 1_000_000
_MOST_ENDED = 1000
Category = Literal["user", "server", "unknown"]


class TooMany(Exception):
    """A tenant has more requests waiting than it may."""


class Requests:
    """Invariant: a request ends once, as done, failed, or refused (it changed nothing)."""

    def __init__(self, database: Database, max_waiting: int):
        """max_waiting: of one tenant."""
        self._database = database
        self._max_waiting = max_waiting
        self._ended: dict[str, asyncio.Event] = {}  # of those that somebody waits for
        self._ended_of: dict[str, asyncio.Event] = {}  # targets that somebody waits for -> any of theirs
        self._waiting: dict[str, int] = defaultdict(int)  # tenant -> requests
        newest = database.find(requests, requests.c.finished > 0, order=requests.c.finished.desc(), limit=1)
        self._newest_end = newest[0].finished if newest else 0.0
        for row in self.unfinished():
            self._waiting[row.tenant] += 1

    def submit(self, id: str, tenant: str, kind: str, target: str, body: bytes) -> tuple[Row, bool]:
        """The request's row, and whether it is new. Raises TooMany."""
        if row := self._database.get(requests, id, "id"):
            return row, False
        if self._waiting[tenant] >= self._max_waiting:
            raise TooMany(f"{self._max_waiting} requests are waiting already; wait for their results first")
        number = self._database.insert(
            requests,
            id=id,
            tenant=tenant,
            kind=kind,
            target=target,
            body=body,
            state="waiting",
            created=now(),
        )
        self._waiting[tenant] += 1
        row = self._database.get(requests, number)
        assert row is not None
        return row, True

    def done(self, row: Row, result: bytes | Mapping[str, Any], media_type: str = JSON) -> None:
        self._end(
            row, "done", result if isinstance(result, bytes) else json.dumps(result).encode(), media_type
        )

    def failed(self, row: Row, message: str, category: Category, refused: bool = False) -> None:
        """refused: it changed nothing."""
        answer = json.dumps({"error": message, "category": category}).encode()
        self._end(row, "refused" if refused else "failed", answer, JSON)

    def _end(self, row: Row, state: str, result: bytes, media_type: str) -> None:
        same = requests.c.number == row.number
        keep = {} if row.kind in CHANGES and state != "refused" else {"body": None}
        # No two at one moment, also where the clock is set back: `ended_after` counts on it.
        self._newest_end = max(now(), self._newest_end + 2 / _CURSOR_PER_SECOND)
        self._database.update(
            requests,
            same,
            state=state,
            result=result,
            media_type=media_type,
            finished=self._newest_end,
            **keep,
        )
        self._waiting[row.tenant] -= 1
        for event in (self._ended.pop(row.id, None), self._ended_of.pop(row.target, None)):
            if event is not None:
                event.set()

    async def wait(self, id: str, tenant: str, seconds: float) -> Row | None:
        """Its row once it has ended, or is still waiting after so long; None where this tenant has none."""
        row = self._database.get(requests, id, "id")
        if row is None or row.tenant != tenant:
            return None
        if row.state == "waiting":
            event = self._ended.setdefault(id, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return row
            row = self._database.get(requests, id, "id")
        return row

    async def ended_after(self, target: str, cursor: int, seconds: float) -> list[tuple[int, Row]]:
        """Those of a model or sampler that ended after the cursor, each with its own, oldest first.

        Waits for the first, but no longer than so many seconds.
        """
        found = self._ended_after(target, cursor)
        if not found and seconds > 0:
            event = self._ended_of.setdefault(target, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
            found = self._ended_after(target, cursor)
        return found

    def _ended_after(self, target: str, cursor: int) -> list[tuple[int, Row]]:
        where = (
            requests.c.target == target,
            requests.c.state != "waiting",
            requests.c.finished > (cursor + 0.5) / _CURSOR_PER_SECOND,
        )
        rows = self._database.find(requests, *where, order=requests.c.finished, limit=_MOST_ENDED)
        return [(round(row.finished * _CURSOR_PER_SECOND), row) for row in rows]

    def unfinished(self) -> list[Row]:
        """In the order in which they came."""
        return list(self._database.find(requests, requests.c.state == "waiting", order=requests.c.number))

    def waiting(self) -> dict[str, int]:
        """Tenant -> requests."""
        return {tenant: count for tenant, count in self._waiting.items() if count}

    def last_failed(self, tenant: str, limit: int) -> list[Row]:
        failed = requests.c.tenant == tenant, requests.c.state.in_(("failed", "refused"))
        return list(self._database.find(requests, *failed, order=requests.c.number.desc(), limit=limit))

    def forget_before(self, moment: float) -> None:
        """Results that nobody fetched. What a model may be restored from stays: see Training."""
        self._database.delete(
            requests, requests.c.state != "waiting", requests.c.finished < moment, requests.c.body.is_(None)
        )
