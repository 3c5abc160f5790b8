"""The tables of servers before version 1, as they made them, with a row or two in each."""

from sqlalchemy import create_engine

TABLES = """
CREATE TABLE checkpoints (
    path VARCHAR(200) NOT NULL,
    model VARCHAR(200) NOT NULL,
    tenant VARCHAR(200) NOT NULL,
    kind VARCHAR(200) NOT NULL,
    name VARCHAR(200) NOT NULL,
    request VARCHAR(200) NOT NULL,
    directory VARCHAR NOT NULL,
    lora JSON NOT NULL,
    created FLOAT NOT NULL,
    num_bytes BIGINT NOT NULL,
    public BOOLEAN NOT NULL,
    expires FLOAT,
    user_metadata JSON,
    PRIMARY KEY (path)
);
CREATE INDEX ix_checkpoints_model ON checkpoints (model);
CREATE INDEX ix_checkpoints_tenant ON checkpoints (tenant);
CREATE TABLE models (
    id VARCHAR(200) NOT NULL,
    session VARCHAR(200) NOT NULL,
    tenant VARCHAR(200) NOT NULL,
    lora JSON NOT NULL,
    seed BIGINT NOT NULL,
    source VARCHAR,
    source_optimizer BOOLEAN NOT NULL,
    snapshot VARCHAR,
    snapshot_number {serial} NOT NULL,
    created FLOAT NOT NULL,
    seen FLOAT NOT NULL,
    user_metadata JSON,
    PRIMARY KEY (id)
);
CREATE INDEX ix_models_tenant ON models (tenant);
CREATE TABLE requests (
    number {serial} NOT NULL,
    id VARCHAR(200) NOT NULL,
    tenant VARCHAR(200) NOT NULL,
    kind VARCHAR(200) NOT NULL,
    target VARCHAR(200) NOT NULL,
    body {bytes},
    state VARCHAR(200) NOT NULL,
    result {bytes},
    media_type VARCHAR,
    created FLOAT NOT NULL,
    finished FLOAT,
    PRIMARY KEY (number),
    UNIQUE (id)
);
CREATE INDEX by_state ON requests (state);
CREATE INDEX by_target ON requests (target, number);
CREATE TABLE samplers (
    id VARCHAR(200) NOT NULL,
    session VARCHAR(200) NOT NULL,
    tenant VARCHAR(200) NOT NULL,
    model_path VARCHAR,
    directory VARCHAR,
    inflight_of VARCHAR(200),
    created FLOAT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE sessions (
    id VARCHAR(200) NOT NULL,
    tenant VARCHAR(200) NOT NULL,
    created FLOAT NOT NULL,
    seen FLOAT NOT NULL,
    display_name VARCHAR,
    user_metadata JSON,
    PRIMARY KEY (id)
);
CREATE INDEX ix_sessions_tenant ON sessions (tenant);
"""
ROWS = """
INSERT INTO sessions VALUES ('s', 'me', 1.0, 2.0, 'name', '{{"a": 1}}');
INSERT INTO models VALUES ('s:train:0', 's', 'me', '{{"rank": 4, "alpha": 32.0, "targets": ["q_proj"]}}', 7, NULL, {false},
    'models/s-train-0/9', 9, 3.0, {now}, NULL);
INSERT INTO models VALUES ('s:train:1', 's', 'me', '{{"rank": 4, "alpha": 32.0, "targets": ["q_proj"]}}', 3, NULL, {false},
    NULL, 0, 4.0, {now}, NULL);
INSERT INTO samplers VALUES ('s:sample:0', 's', 'me', NULL, 'samplers/s/4', NULL, 5.0);
INSERT INTO samplers VALUES ('s:sample:1', 's', 'me', 'tinker://s:train:0/weights/x', 'checkpoints/s-train-0/weights/x', NULL, 5.0);
INSERT INTO checkpoints VALUES ('tinker://s:train:0/weights/x', 's:train:0', 'me', 'weights', 'x', 's:train:0:5',
    'checkpoints/s-train-0/weights/x', '{{"rank": 4, "alpha": 32.0, "targets": ["q_proj"]}}', 6.0, 12, {false}, NULL, NULL);
INSERT INTO requests (id, tenant, kind, target, body, state, result, media_type, created, finished) VALUES
    ('s:train:1:0', 'me', 'create_model', 's:train:1', NULL, 'done', {result}, 'application/json', 6.0, 7.0);
INSERT INTO requests (id, tenant, kind, target, body, state, result, media_type, created, finished) VALUES
    ('s:train:1:1', 'me', 'optim_step', 's:train:1', {body}, 'failed', {result}, 'application/json', 6.0, 8.0)
"""
_DIALECTS = {
    "sqlite": {"serial": "INTEGER", "bytes": "BLOB", "false": "0", "body": "X'7b7d'", "result": "X'7b7d'"},
    "postgresql": {"serial": "SERIAL", "bytes": "BYTEA", "false": "FALSE", "body": "'{}'", "result": "'{}'"},
}


def make(url: str, now: float, rows: bool = True) -> None:
    """A database of that version. now: when its models were used last."""
    engine = create_engine(url)
    words = _DIALECTS[engine.dialect.name] | {"now": now}
    with engine.begin() as connection:
        for statement in [*TABLES.split(";"), *(ROWS.split(";") if rows else [])]:
            if statement.strip():
                connection.exec_driver_sql(statement.format(**words))
    engine.dispose()
