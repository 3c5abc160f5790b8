"""From the tables of an older server to those of this one: a function from each version to the next.

They are text, not the tables of `database`, which go on to change. All steps are one transaction, so that a
server that is killed in the middle leaves the database as it was.
"""

from collections.abc import Callable

from sqlalchemy import Connection, MetaData, inspect, text

from rl.errors import ConfigError

_TABLE = "schema_version"  # one row, one number; servers before version 1 had no such table


def migrate(connection: Connection, metadata: MetaData) -> None:
    """Inside a transaction. Raises ConfigError for a database of a newer server."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(724001)")  # two servers at once
    version = _version(connection)
    if version is None:
        metadata.create_all(connection)
    elif version > len(STEPS):
        raise ConfigError(
            f"the database has tables of version {version}, this server knows versions up to {len(STEPS)}: "
            f"use the newer server that wrote it, or give another database"
        )
    else:
        for step in STEPS[version:]:
            step(connection)
    if version != len(STEPS):
        connection.exec_driver_sql(f"CREATE TABLE IF NOT EXISTS {_TABLE} (version INTEGER NOT NULL)")
        connection.exec_driver_sql(f"DELETE FROM {_TABLE}")
        connection.exec_driver_sql(f"INSERT INTO {_TABLE} VALUES ({len(STEPS)})")


def _version(connection: Connection) -> int | None:
    """None: there are no tables yet."""
    tables = inspect(connection).get_table_names()
    if _TABLE in tables:
        return connection.execute(text(f"SELECT version FROM {_TABLE}")).scalar_one()
    return 0 if "requests" in tables else None


_NEW_INDICES = """
DROP INDEX ix_sessions_tenant;
DROP INDEX ix_models_tenant;
DROP INDEX ix_checkpoints_model;
DROP INDEX ix_checkpoints_tenant;
CREATE INDEX sessions_of_tenant ON sessions (tenant, created);
CREATE INDEX sessions_by_end ON sessions (ended, seen);
CREATE INDEX models_of_tenant ON models (tenant, created);
CREATE INDEX models_of_session ON models (session);
CREATE INDEX models_by_use ON models (seen);
CREATE INDEX samplers_of_tenant ON samplers (tenant);
CREATE INDEX samplers_of_session ON samplers (session);
CREATE INDEX samplers_of_model ON samplers (inflight_of);
CREATE INDEX requests_of_target ON requests (target, number);
CREATE INDEX ended_of_target ON requests (target, finished);
CREATE INDEX requests_by_state ON requests (state, finished);
CREATE INDEX requests_of_tenant ON requests (tenant, state, finished, num_bytes);
CREATE INDEX forgettable ON requests (finished) WHERE body IS NULL;
CREATE INDEX checkpoints_of_tenant ON checkpoints (tenant, created);
CREATE INDEX checkpoints_of_model ON checkpoints (model, created);
CREATE INDEX checkpoints_by_end ON checkpoints (expires)
"""
_NEW_COLUMNS = """
ALTER TABLE sessions ADD COLUMN ended FLOAT;
ALTER TABLE models ADD COLUMN snapshot_bytes BIGINT;
ALTER TABLE samplers ADD COLUMN num_bytes BIGINT
"""
_COLUMNS = "number, id, tenant, kind, target, body, state, result, media_type, created, finished"
_BYTES = "coalesce(length(body), 0) + coalesce(length(result), 0)"
_SQLITE_REQUESTS = f"""
ALTER TABLE requests RENAME TO old_requests;
DROP INDEX by_state;
DROP INDEX by_target;
CREATE TABLE requests (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    id VARCHAR(200) NOT NULL,
    tenant VARCHAR(200) NOT NULL,
    kind VARCHAR(200) NOT NULL,
    target VARCHAR(200) NOT NULL,
    body BLOB,
    state VARCHAR(200) NOT NULL,
    result BLOB,
    media_type VARCHAR,
    created FLOAT NOT NULL,
    finished FLOAT,
    num_bytes BIGINT NOT NULL,
    deaths INTEGER NOT NULL,
    UNIQUE (id)
);
INSERT INTO requests ({_COLUMNS}, num_bytes, deaths) SELECT {_COLUMNS}, {_BYTES}, 0 FROM old_requests;
DROP TABLE old_requests;
"""
_POSTGRES_REQUESTS = f"""
DROP INDEX by_state;
DROP INDEX by_target;
ALTER TABLE requests ALTER COLUMN number TYPE BIGINT;
ALTER SEQUENCE requests_number_seq AS BIGINT;
ALTER TABLE models ALTER COLUMN snapshot_number TYPE BIGINT;
ALTER TABLE requests ADD COLUMN num_bytes BIGINT NOT NULL DEFAULT 0;
ALTER TABLE requests ALTER COLUMN num_bytes DROP DEFAULT;
ALTER TABLE requests ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0;
ALTER TABLE requests ALTER COLUMN deaths DROP DEFAULT;
UPDATE requests SET num_bytes = {_BYTES};
SELECT setval('requests_number_seq', greatest((SELECT last_value FROM requests_number_seq),
    (SELECT coalesce(max(snapshot_number), 0) FROM models) + 1))
"""
# Numbers were used again, so that a snapshot may say more than the newest request's.
_SQLITE_SEQUENCE = """
DELETE FROM sqlite_sequence WHERE name = 'requests';
INSERT INTO sqlite_sequence (name, seq) SELECT 'requests', max(
    (SELECT coalesce(max(number), 0) FROM requests), (SELECT coalesce(max(snapshot_number), 0) FROM models))
"""


def _to_version_1(connection: Connection) -> None:
    """Numbers of requests are never used again, sizes are kept, each question has an index."""
    requests = {
        "sqlite": f"{_SQLITE_REQUESTS}; {_SQLITE_SEQUENCE}",
        "postgresql": _POSTGRES_REQUESTS,
    }
    for script in (_NEW_COLUMNS, requests[connection.dialect.name], _NEW_INDICES):
        for statement in filter(str.strip, script.split(";")):
            connection.exec_driver_sql(statement)


def _to_version_2(connection: Connection) -> None:
    """The database knows its base model, which the server notes at its start."""
    connection.exec_driver_sql("CREATE TABLE base_model (fingerprint VARCHAR(200) NOT NULL PRIMARY KEY)")


STEPS: tuple[Callable[[Connection], None], ...] = (_to_version_1, _to_version_2)
