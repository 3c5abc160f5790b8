"""What a restart must not lose: sessions, models, requests with their results, samplers, checkpoints.

SQLite beside the checkpoints, or any database that SQLAlchemy knows by its URL. Each change is committed
before a client hears of it.
"""

import time
from collections.abc import Sequence
from typing import Any

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
    create_engine,
    event,
    select,
)
from sqlalchemy.engine import CursorResult, Row
from sqlalchemy.exc import DataError, SQLAlchemyError

from rl.errors import ConfigError, one_line
from rl.tinker.backend import UserError

metadata = MetaData()
_Id = String(200)

sessions = Table(
    "sessions", metadata,
    Column("id", _Id, primary_key=True),
    Column("tenant", _Id, nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("display_name", String, nullable=True),
    Column("user_metadata", JSON, nullable=True),
)  # fmt: skip
models = Table(
    "models", metadata,
    Column("id", _Id, primary_key=True),
    Column("session", _Id, nullable=False),
    Column("tenant", _Id, nullable=False, index=True),
    Column("lora", JSON, nullable=False),  # {rank, alpha, targets}
    Column("seed", BigInteger, nullable=False),
    Column("source", String, nullable=True),  # the checkpoint that it began from: a directory, as below
    Column("source_optimizer", Boolean, nullable=False),
    Column("snapshot", String, nullable=True),  # directory of what `snapshot_number` left
    Column("snapshot_number", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("user_metadata", JSON, nullable=True),
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
)  # fmt: skip
requests = Table(
    "requests", metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),  # the order of arrival
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
    Index("by_target", "target", "number"),
    Index("by_state", "state"),
)  # fmt: skip
checkpoints = Table(
    "checkpoints", metadata,
    Column("path", _Id, primary_key=True),  # tinker://
    Column("model", _Id, nullable=False, index=True),
    Column("tenant", _Id, nullable=False, index=True),
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
)  # fmt: skip


class Database:
    """Rows in, rows out. For one process and one thread."""

    def __init__(self, url: str):
        """Raises ConfigError where there is no such database."""
        try:
            self._engine = create_engine(url)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "connect", _make_durable)
            metadata.create_all(self._engine)
            self._connection = self._engine.connect()
        except (SQLAlchemyError, ImportError) as error:
            what = one_line(error)
            raise ConfigError(f"the database {url} cannot be used ({what}); give another URL") from error
        self._selects: dict[tuple[str, str], Any] = {}  # built once: SQLAlchemy takes as long as SQLite

    def insert(self, table: Table, **values: Any) -> Any:
        """Returns the new row's key."""
        key = self._run(table.insert(), values, changes=True).inserted_primary_key
        return key[0] if key else None

    def get(self, table: Table, key: Any, column: str | None = None) -> Row | None:
        """By its key, or by another unique column."""
        by = table.c[column] if column else next(iter(table.primary_key.columns))
        name = table.name, by.name
        if name not in self._selects:
            self._selects[name] = select(table).where(by == bindparam("key"))
        return self._run(self._selects[name], {"key": key}).first()

    def find(self, table: Table, *where: Any, order: Any = None, limit: int | None = None) -> Sequence[Row]:
        query = select(table).where(*where)
        if order is not None:
            query = query.order_by(order)
        return self._run(query.limit(limit) if limit else query).all()

    def update(self, table: Table, *where: Any, **values: Any) -> None:
        self._run(table.update().where(*where).values(**values), changes=True)

    def delete(self, table: Table, *where: Any) -> None:
        self._run(table.delete().where(*where), changes=True)

    def _run(
        self, statement: Any, values: dict[str, Any] | None = None, changes: bool = False
    ) -> CursorResult:
        """Raises UserError for values that no database takes: they are a client's."""
        try:
            result = self._connection.execute(statement, values)
        except (OverflowError, UnicodeEncodeError, DataError) as error:
            self._connection.rollback()
            raise UserError(f"a value that cannot be kept: {error}".splitlines()[0]) from error
        if changes:
            self._connection.commit()
        return result

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()


def _make_durable(connection: Any, _record: Any) -> None:
    """A commit outlives the death of this process; not, the last ones, that of the machine."""
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}")


def now() -> float:
    """Seconds since 1970."""
    return time.time()
