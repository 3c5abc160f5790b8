"""What a restart must not lose: sessions, models, requests with their results, samplers, checkpoints.

SQLite beside the checkpoints, or PostgreSQL. Each change is committed before a client hears of it. Whoever
changes the tables below adds a step to `migrations`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    bindparam,
    func,
    select,
    text,
)
from sqlalchemy.engine import CursorResult, Row

from rl.tinker import migrations
from rl.tinker.backend import UserError
from rl.tinker.connection import Connection, Unavailable

T = TypeVar("T")
_REST_SECONDS = 1.0
metadata = MetaData()
_Id = String(200)
_NO_BODY = text("body IS NULL")

sessions = Table(
    "sessions", metadata,
    Column("id", _Id, primary_key=True),
    Column("tenant", _Id, nullable=False),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("display_name", String, nullable=True),
    Column("user_metadata", JSON, nullable=True),
    Column("ended", Float, nullable=True),  # when its samplers went
    Index("sessions_of_tenant", "tenant", "created"),
    Index("sessions_by_end", "ended", "seen"),
)  # fmt: skip
models = Table(
    "models", metadata,
    Column("id", _Id, primary_key=True),
    Column("session", _Id, nullable=False),
    Column("tenant", _Id, nullable=False),
    Column("lora", JSON, nullable=False),  # {rank, alpha, targets}
    Column("seed", BigInteger, nullable=False),
    Column("source", String, nullable=True),  # the checkpoint that it began from: a directory, as below
    Column("source_optimizer", Boolean, nullable=False),
    Column("snapshot", String, nullable=True),  # directory of what `snapshot_number` left
    Column("snapshot_number", BigInteger, nullable=False),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("user_metadata", JSON, nullable=True),
    Column("snapshot_bytes", BigInteger, nullable=True),  # None: not measured yet, as below
    Index("models_of_tenant", "tenant", "created"),
    Index("models_of_session", "session"),
    Index("models_by_use", "seen"),
)  # fmt: skip
samplers = Table(
    "samplers", metadata,
    Column("id", _Id, primary_key=True),
    Column("session", _Id, nullable=False),
    Column("tenant", _Id, nullable=False),
    Column("model_path", String, nullable=True),  # tinker://, as the client named it
    Column("directory", String, nullable=True),  # the adapter, as below; None for the base model
    Column("inflight_of", _Id, nullable=True),  # a model whose newest weights are sampled with
    Column("created", Float, nullable=False),
    Column("num_bytes", BigInteger, nullable=True),  # of the weights that were written for it alone
    Index("samplers_of_tenant", "tenant"),
    Index("samplers_of_session", "session"),
    Index("samplers_of_model", "inflight_of"),
)  # fmt: skip
requests = Table(
    "requests", metadata,
    # The order of arrival. No number is used again: a model's snapshot says up to which it goes.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("id", _Id, nullable=False, unique=True),  # from what the client named it by: a retry finds it
    Column("tenant", _Id, nullable=False),
    Column("kind", _Id, nullable=False),
    Column("target", _Id, nullable=False),  # the model, or the sampler
    Column("body", LargeBinary, nullable=True),
    Column("state", _Id, nullable=False),  # waiting, done, failed or refused (it changed nothing)
    Column("result", LargeBinary, nullable=True),
    Column("media_type", String, nullable=True),
    Column("created", Float, nullable=False),
    Column("finished", Float, nullable=True),
    Column("num_bytes", BigInteger, nullable=False, default=0),  # of body and result
    Column("deaths", Integer, nullable=False, default=0),  # of the server, while it ran
    Index("requests_of_target", "target", "number"),
    Index("ended_of_target", "target", "finished"),
    Index("requests_by_state", "state", "finished"),
    Index("requests_of_tenant", "tenant", "state", "finished", "num_bytes"),
    Index("forgettable", "finished", sqlite_where=_NO_BODY, postgresql_where=_NO_BODY),
    sqlite_autoincrement=True,
)  # fmt: skip
checkpoints = Table(
    "checkpoints", metadata,
    Column("path", _Id, primary_key=True),  # tinker://
    Column("model", _Id, nullable=False),
    Column("tenant", _Id, nullable=False),
    Column("kind", _Id, nullable=False),
    Column("name", _Id, nullable=False),
    Column("request", _Id, nullable=False),  # which made it
    Column("directory", String, nullable=False),  # in the server's, which may be moved
    Column("lora", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("public", Boolean, nullable=False),
    Column("expires", Float, nullable=True),
    Column("user_metadata", JSON, nullable=True),
    Index("checkpoints_of_tenant", "tenant", "created"),
    Index("checkpoints_of_model", "model", "created"),
    Index("checkpoints_by_end", "expires"),
)  # fmt: skip
base_model = Table(
    "base_model", metadata,  # one row, once a model was served
    Column("fingerprint", _Id, primary_key=True),
)  # fmt: skip


class Database:
    """Rows in, rows out. For one process and one thread.

    A change is repeated where its answer was lost (see Connection): so no update may add to what is there,
    and each row that is inserted has a key that no other has.
    """

    def __init__(self, url: str):
        """Raises ConfigError where there is no such database, or a newer server made it."""
        self._connection = Connection(url)
        try:
            self._connection.at_start(lambda connection: migrations.migrate(connection, metadata))
        except BaseException:
            self._connection.close()
            raise
        self._selects: dict[tuple[str, str], Any] = {}  # built once: SQLAlchemy takes as long as SQLite

    def insert(self, table: Table, **values: Any) -> None:
        _check(table, values)
        self._run(table.insert(), values, changes=True)

    def get(self, table: Table, key: Any, column: str | None = None) -> Row | None:
        """By its key, or by another unique column."""
        by = table.c[column] if column else next(iter(table.primary_key.columns))
        name = table.name, by.name
        if name not in self._selects:
            self._selects[name] = select(table).where(by == bindparam("key"))
        _check(table, {by.name: key})
        return self._run(self._selects[name], {"key": key}).first()

    def find(
        self, table: Table, *where: Any, order: Any = None, limit: int | None = None, offset: int = 0
    ) -> Sequence[Row]:
        query = select(table).where(*where)
        if order is not None:
            query = query.order_by(*(order if isinstance(order, tuple) else (order,)))
        if limit is not None:
            query = query.limit(limit)
        return self._run(query.offset(offset) if offset else query).all()

    def rows(self, query: Any) -> Sequence[Row]:
        """Of any SELECT."""
        return self._run(query).all()

    def count(self, table: Table, *where: Any) -> int:
        return self._run(select(func.count()).select_from(table).where(*where)).scalar_one()

    def update(self, table: Table, *where: Any, **values: Any) -> None:
        _check(table, values)
        self._run(table.update().where(*where).values(**values), changes=True)

    def delete(self, table: Table, *where: Any) -> None:
        self._run(table.delete().where(*where), changes=True)

    def change(self, *statements: Any, durable: bool = False) -> None:
        """All of them or none. durable: they outlive the machine's death; what is deleted next does not."""
        self._connection.change(statements, durable)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Its result; it is called once more as long as the database cannot be reached."""
        while True:
            try:
                return await call()
            except Unavailable:
                await asyncio.sleep(_REST_SECONDS)

    def _run(
        self, statement: Any, values: dict[str, Any] | None = None, changes: bool = False
    ) -> CursorResult:
        """changes: for a database of the tests, which fails before or after what changes rows."""
        return self._connection.run(statement, values)

    def close(self) -> None:
        self._connection.close()


def _check(table: Table, values: dict[str, Any]) -> None:
    """Raises UserError for texts that not every database takes: they are a client's."""
    for name, value in values.items():
        if isinstance(value, str):
            check_text(name, value, getattr(table.c[name].type, "length", None))


def check_text(name: str, value: str, longest: int | None) -> None:
    """Raises UserError where a database would not take it as `name`."""
    if longest is not None and len(value) > longest:
        raise UserError(f"a {name} of {len(value)} characters; it may have {longest}")
    if "\0" in value or not (value.isascii() or value == value.encode("utf-8", "replace").decode()):
        raise UserError(f"a {name} with a character that is none (NUL, or half of a surrogate pair)")


def now() -> float:
    """Seconds since 1970."""
    return time.time()
