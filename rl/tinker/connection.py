"""Connection: one to SQLite or PostgreSQL. One that is lost is made again; then a statement is repeated."""

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, CursorResult, Engine, make_url
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    SQLAlchemyError,
    StatementError,
)
from sqlalchemy.pool import NullPool

from rl.errors import ConfigError, RunError, one_line
from rl.tinker.backend import UserError

T = TypeVar("T")
_CONNECT_SECONDS = 5
_STATEMENT_SECONDS = 10
_ANSWER_SECONDS = _STATEMENT_SECONDS + 1.0  # where the server does not keep to that
_AT_ONCE_SECONDS = 1.0  # for a new connection, which a server that works makes in milliseconds
_POSTGRES = {
    "connect_timeout": _CONNECT_SECONDS,
    "tcp_user_timeout": 1000 * _STATEMENT_SECONDS,  # a network that takes nothing any more
    "keepalives_idle": _STATEMENT_SECONDS,  # a machine that is gone
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "options": f"-c statement_timeout={_STATEMENT_SECONDS}s -c lock_timeout=5s -c tcp_keepalives_idle=10 "
    "-c tcp_keepalives_interval=2 -c tcp_keepalives_count=3",
}
_REST_SECONDS = 0.5  # between two attempts to connect
_LOCK = 724002
_BEGIN = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "BEGIN"}


class Unavailable(RunError):
    """The database cannot be reached, or its disk is full: the same may work later."""


class _InUse(Exception):
    """Another server has the database."""


class Connection:
    """Every statement is a transaction of its own, but for those that `change` is called with together.

    A statement is repeated where its answer was lost, so it has to do the same when it is done twice. An
    insert does: rows have unique keys, and one that is there already was inserted the first time.
    """

    def __init__(self, url: str):
        """Raises ConfigError where there is no such database."""
        self._connection: sqlalchemy.Connection | None = None
        self._rest_until = 0.0
        self._connecting: Future[sqlalchemy.Connection] | None = None
        self._thread = ThreadPoolExecutor(1, "database")
        try:
            self._engine = _engine(_read(url))
            until = time.monotonic() + _CONNECT_SECONDS  # so long PostgreSQL may need to miss a dead server
            while self._connection is None:
                try:
                    self._connection = self._connect()
                except _InUse as error:
                    if time.monotonic() > until:
                        raise ConfigError(f"{error}; give each server one of its own") from error
                    time.sleep(0.1)
        except ImportError as error:
            raise ConfigError(
                f"the database cannot be used ({error}); install the extra `postgres`"
            ) from error
        except SQLAlchemyError as error:
            raise ConfigError(f"the database cannot be used ({one_line(error)}); give another URL") from error

    def _connect(self) -> sqlalchemy.Connection:
        """Raises _InUse where another server has the database: both would do the same requests."""
        connection = self._engine.connect()
        if self.dialect != "postgresql":
            return connection
        self._bound(connection, _ANSWER_SECONDS)
        if not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})").scalar():
            connection.close()
            raise _InUse("the database is in use by another server")
        return connection

    def _bound(self, connection: sqlalchemy.Connection, seconds: float | None) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.answer_seconds = seconds

    def _connect_again(self) -> sqlalchemy.Connection:
        """Made beside the event loop, which waits for it once, and shortly. Until then raises Unavailable."""
        if self._connecting is None:
            if time.monotonic() < self._rest_until:
                raise Unavailable("the database cannot be reached; the same may work in a minute")
            self._connecting = self._thread.submit(self._connect)
            wait({self._connecting}, 0.0 if self._rest_until else _AT_ONCE_SECONDS)
            self._rest_until = time.monotonic() + _REST_SECONDS
        if not self._connecting.done():
            raise Unavailable("the database does not answer; the same may work in a minute")
        attempt, self._connecting = self._connecting, None
        connection = attempt.result()
        self._rest_until = 0.0
        return connection

    @property
    def dialect(self) -> str:
        return self._engine.dialect.name

    def run(self, statement: Any, values: Mapping[str, Any] | None = None) -> CursorResult:
        """Raises UserError for values that no database takes, because they are a client's; Unavailable."""
        return self._twice(lambda connection: connection.execute(statement, values))

    def change(self, statements: Sequence[Any], durable: bool = False) -> None:
        """All of them or none. durable: they outlive the machine's death, not only this process's."""

        def work(connection: sqlalchemy.Connection) -> None:
            self.transact(connection, lambda: [connection.execute(statement) for statement in statements])

        synced = durable and self.dialect == "sqlite"  # PostgreSQL's are in any case
        if synced:
            self._twice(lambda connection: connection.exec_driver_sql("PRAGMA synchronous=FULL"))
        try:
            self._twice(work)
        finally:
            if synced:
                self._twice(lambda connection: connection.exec_driver_sql("PRAGMA synchronous=NORMAL"))

    def transact(self, connection: sqlalchemy.Connection, work: Callable[[], Any]) -> None:
        connection.exec_driver_sql(_BEGIN[self.dialect])
        try:
            work()
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            with suppress(SQLAlchemyError):
                connection.exec_driver_sql("ROLLBACK")
            raise

    def at_start(self, work: Callable[[sqlalchemy.Connection], None]) -> None:
        """In one transaction, which may take long: a migration. Raises ConfigError."""
        connection = self._connection
        assert connection is not None
        is_postgres = self.dialect == "postgresql"
        try:
            if is_postgres:
                self._bound(connection, None)
                connection.exec_driver_sql("SET statement_timeout = '1h'")
            self.transact(connection, lambda: work(connection))
            if is_postgres:
                milliseconds = int(1000 * _STATEMENT_SECONDS)
                connection.exec_driver_sql(f"SET statement_timeout = {milliseconds}")
                self._bound(connection, _ANSWER_SECONDS)
        except SQLAlchemyError as error:
            raise ConfigError(f"the database cannot be used ({one_line(error)}); give another URL") from error

    def _twice(self, work: Callable[[sqlalchemy.Connection], T]) -> T:
        """Once more on a new connection where the old one is lost.

        A server that does not answer holds the process up once, for `_ANSWER_SECONDS`.
        """
        again = False
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connect_again()
                return work(self._connection)
            except (OperationalError, InterfaceError, InternalError, _InUse) as error:
                if _is_ours(error):
                    raise
                if self._connection is not None and getattr(error, "connection_invalidated", False):
                    self._forget()
                    if not again:
                        again = True
                        continue
                raise Unavailable(
                    f"the database does not work ({_reason(error)}); the same may work in a minute"
                ) from error
            except IntegrityError:
                if not again:
                    raise
                return None  # type: ignore[return-value]  # it was done, and the answer lost
            except (OverflowError, ValueError, DataError) as error:
                raise UserError(f"a value that cannot be kept: {_reason(error)}") from error
            except StatementError as error:
                if isinstance(error, DBAPIError):
                    raise
                raise UserError(f"a value that cannot be kept: {_reason(error)}") from error  # by to_json

    def _forget(self) -> None:
        """The connection, which is lost."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.close()

    def close(self) -> None:
        self._forget()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._engine.dispose()


def _read(url: str) -> URL:
    """Raises ConfigError for a database that nobody has tried."""
    read = make_url(url)
    if read.drivername in ("postgresql", "postgres"):
        read = read.set(drivername="postgresql+psycopg")
    if read.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise ConfigError(
            f"the database {read.drivername!r} cannot be used; give sqlite:///FILE or postgresql://..."
        )
    return read


def _engine(url: URL) -> Engine:
    is_sqlite = url.get_backend_name() == "sqlite"
    engine = create_engine(
        url,
        isolation_level="AUTOCOMMIT",
        poolclass=NullPool,  # a connection that is closed gives back its lock
        connect_args={} if is_sqlite else _POSTGRES | dict(url.query),
        json_serializer=to_json,
    )
    if is_sqlite:
        event.listen(engine, "connect", _set_up_sqlite)
    else:
        event.listen(engine, "do_connect", _connect_bounded)
    return engine


def _connect_bounded(_dialect: Any, _record: Any, args: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    from rl.tinker.bounded_postgres import BoundedConnection  # needs the extra `postgres`

    return BoundedConnection.connect(*args, **settings)


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    """A commit outlives the death of this process; not, the last ones, that of the machine."""
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000", "cache_size=-65536"):
        connection.execute(f"PRAGMA {pragma}")


def to_json(value: Any) -> str:
    """Raises ValueError for what has no JSON (NaN), or no UTF-8 (half of a surrogate pair)."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _is_ours(error: Exception) -> bool:
    """Whether the statement is wrong: SQLite has one class for that and for a full disk."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _reason(error: Exception) -> str:
    cause = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    return f"{cause}".splitlines()[0] if f"{cause}" else type(cause).__name__
