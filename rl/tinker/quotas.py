"""Quotas: how much each tenant keeps on this server."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from sqlalchemy import Table, func, select

from rl.tinker.backend import UserError
from rl.tinker.database import Database, checkpoints, models, requests, samplers, sessions
from rl.tinker.limits import Limits
from rl.tinker.room import GONE, Room

_GIB = 1 << 30
_DAY_SECONDS = 24 * 3600


class Quotas:
    """Bytes are counted here from the start on, rows in the database.

    A tenant's bytes are its checkpoints, weights of its samplers, snapshots of its models, and requests
    with their results. What the server itself has to write (results, snapshots) is counted, never refused.
    """

    def __init__(self, database: Database, root: Path, limits: Limits):
        self._database = database
        self._most_bytes = int(limits.max_disk_gib * _GIB)
        self._most_rows: dict[Table, int] = {
            sessions: limits.max_tenant_sessions,
            models: limits.max_tenant_models,
            samplers: limits.max_tenant_samplers,
        }
        self._remedies = _remedies(limits)
        self._bytes: dict[str, int] = defaultdict(int)
        self._room = Room(database, root)
        _measure(database, root)
        for column in (
            checkpoints.c.num_bytes, samplers.c.num_bytes, models.c.snapshot_bytes, requests.c.num_bytes
        ):  # fmt: skip
            tenant = column.table.c.tenant
            for name, total in database.rows(select(tenant, func.sum(column)).group_by(tenant)):
                self._bytes[name] += int(total or 0)

    def add(self, tenant: str, num_bytes: int) -> None:
        """What is kept now; negative: what went."""
        self._bytes[tenant] += num_bytes

    def used(self, tenant: str) -> int:
        """Bytes."""
        return self._bytes.get(tenant, 0)

    def check(self, tenant: str, num_bytes: int, target: str = "") -> None:
        """Raises UserError where so many more are too many, also without what nobody uses any more.

        target: the model or sampler that they are for, which stays.
        """
        missing = self.used(tenant) + num_bytes - self._most_bytes
        if missing > 0 and (freed := self._room.free(tenant, missing, target)):
            self.add(tenant, -freed)
        used = self.used(tenant)
        if used + num_bytes > self._most_bytes:
            raise UserError(
                f"you keep {used / _GIB:.3g} GiB on this server, this takes {num_bytes / _GIB:.3g} more, and "
                f"limits.max_disk_gib is {self._most_bytes / _GIB:g}: {self._remedies[checkpoints]}"
            )

    def check_count(self, table: Table, tenant: str) -> None:
        """Raises UserError where a tenant has as many sessions, models or samplers as it may."""
        most = self._most_rows[table]
        own = [table.c.tenant == tenant, *((models.c.seen > GONE,) if table is models else ())]
        if table is models and (missing := self._database.count(table, *own) + 1 - most) > 0:
            self._room.free_models(tenant, missing)
        if self._database.count(table, *own) >= most:
            raise UserError(
                f"you have {most} {table.name}, as many as limits.max_tenant_{table.name} allows: "
                f"{self._remedies[table]}"
            )


def _remedies(limits: Limits) -> dict[Table, str]:
    """What frees rows of each table, and when; of checkpoints: bytes."""
    results = f"limits.keep_seconds ({limits.keep_seconds / _DAY_SECONDS:.3g} days)"
    unused = f"limits.keep_models_seconds ({limits.keep_models_seconds / _DAY_SECONDS:.3g} days)"
    over = "and makes room for others a day after it, once its session is over"
    return {
        sessions: f"finish sessions; one without models goes {results} after its end, one with models when "
        f"the last of them goes, {unused} after that model's last request",
        models: f"go on with one of them (load_state loads a checkpoint of its rank and layers); a model "
        f"goes {unused} after its last request, {over}",
        samplers: "finish sessions: their samplers go at once",
        checkpoints: f"delete checkpoints, give them a shorter ttl, or finish sessions, whose samplers' "
        f"weights go at once; a result goes {results} after it ended, a model's snapshot {unused} after the "
        f"model's last request, {over}",
    }


def _measure(database: Database, root: Path) -> None:
    """What servers wrote that did not note sizes."""
    for table, directory, size, where in (
        (models, models.c.snapshot, "snapshot_bytes", ()),
        (samplers, samplers.c.directory, "num_bytes", (samplers.c.model_path.is_(None),)),
    ):
        for row in database.find(table, table.c[size].is_(None), directory.is_not(None), *where):
            values: dict[str, Any] = {size: size_of(root / row._mapping[directory.name])}
            database.update(table, table.c.id == row.id, **values)


def size_of(directory: Path) -> int:
    """Bytes of its files; 0 where it is gone."""
    if not directory.is_dir():
        return 0
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
