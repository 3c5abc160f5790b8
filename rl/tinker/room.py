"""Room for what a tenant keeps: what nobody uses any more goes, the one unused the longest first."""

import asyncio
import shutil
from functools import partial
from itertools import accumulate
from pathlib import Path

from sqlalchemy import ColumnElement, Exists, func, select
from sqlalchemy.engine import Row

from rl.tinker.database import Database, models, now, requests, samplers, sessions

_SAMPLER_SECONDS = 600.0
"""A client may yet sample with weights that it saved or sampled with so long ago."""
_MODEL_SECONDS = 24 * 3600.0
"""A client may yet send a request to a model, though its session is over."""
GONE = 0.0
"""`seen` of a model that cannot be used any more."""
ROW_ALONE = -1.0
"""`seen` of a model of which the row is left, with its checkpoints: it is their training run."""


class Room:
    """Frees weights without a name, of which a loop of training saves some in each step; then models of
    sessions that are over, which no SDK can name any more. What a request waits for stays."""

    def __init__(self, database: Database, root: Path):
        self._database = database
        self._root = root

    def free(self, tenant: str, num_bytes: int, keep: str = "") -> int:
        """Bytes freed: at least so many, or 0 where that cannot be. keep: a sampler or model that stays.

        Requests to a sampler whose weights went are answered that they were deleted; those to a model, that
        it is gone. The sweep deletes the rest of the model.
        """
        weights = [row for row in self._unused_weights(tenant) if row.id != keep]
        snapshots = [row for row in self._unused_models(tenant) if row.snapshot_bytes and row.id != keep]
        sizes = [*(row.num_bytes for row in weights), *(row.snapshot_bytes for row in snapshots)]
        totals = list(accumulate(sizes))
        count = next((i for i, total in enumerate(totals, 1) if total >= num_bytes), 0)
        if count == 0:
            return 0
        weights, snapshots = weights[:count], snapshots[: max(0, count - len(weights))]
        samplers_go = samplers.c.id.in_([row.id for row in weights])
        models_go = models.c.id.in_([row.id for row in snapshots])
        self._database.change(
            samplers.update().where(samplers_go).values(num_bytes=0),
            models.update().where(models_go).values(snapshot_bytes=0, seen=GONE),
        )
        for directory in (*(row.directory for row in weights), *(row.snapshot for row in snapshots)):
            remove = partial(shutil.rmtree, self._root / directory, ignore_errors=True)
            asyncio.get_running_loop().run_in_executor(None, remove)  # it may hold gigabytes
        return totals[count - 1]

    def free_models(self, tenant: str, count: int) -> None:
        """So many, unused the longest, which do not count any more; none where fewer are unused."""
        ids = [row.id for row in self._unused_models(tenant)[:count]]
        if len(ids) == count:
            self._database.update(models, models.c.id.in_(ids), seen=GONE)

    def _unused_weights(self, tenant: str) -> list[Row]:
        """Those of a sampler that follows its model are its model's newest."""
        of_sampler = requests.c.target == samplers.c.id
        last_end = select(func.max(requests.c.finished)).where(of_sampler).scalar_subquery()
        used = func.coalesce(last_end, samplers.c.created)
        unused = samplers.c.inflight_of.is_(None), used < now() - _SAMPLER_SECONDS
        own = samplers.c.tenant == tenant, samplers.c.num_bytes > 0
        query = select(samplers).where(*own, *unused, ~_waits_for(samplers.c.id)).order_by(used)
        return list(self._database.rows(query))

    def _unused_models(self, tenant: str) -> list[Row]:
        own_session = sessions.c.id == models.c.session
        is_over = select(sessions.c.id).where(own_session, sessions.c.ended.is_not(None)).exists()
        unused = is_over, models.c.seen > GONE, models.c.seen < now() - _MODEL_SECONDS
        query = select(models).where(models.c.tenant == tenant, *unused, ~_waits_for(models.c.id))
        return list(self._database.rows(query.order_by(models.c.seen)))


def _waits_for(target: ColumnElement[str]) -> Exists:
    return select(requests.c.id).where(requests.c.target == target, requests.c.finished.is_(None)).exists()
