"""A database of an older server becomes this one's, whole, whenever the server is killed in the middle of it."""

# holds: exact, counts of rows and bytes

import asyncio
import contextlib

import pytest
from sqlalchemy import create_engine, event, inspect

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.errors import ConfigError
from rl.tinker import migrations
from rl.tinker.database import Database, base_model, checkpoints, models, now, requests, samplers, sessions
from rl.tinker.limits import Limits
from tests.tinker import version_0
from tests.tinker.databases import url_of
from tests.tinker.lives import living, make_model, train, value_of

TABLES = (sessions, models, samplers, checkpoints, requests)


def shape_of(url):
    """Columns and indices of each table, as the database says."""
    engine = create_engine(url)
    inspector = inspect(engine)
    shape = {}
    for table in (*TABLES, base_model):
        columns = inspector.get_columns(table.name)
        sizes = {"INTEGER": "BIGINT"} if engine.dialect.name == "sqlite" else {}  # there they are the same
        shape[table.name] = (
            {c["name"]: (sizes.get(str(c["type"]), str(c["type"])), c["nullable"]) for c in columns},
            {i["name"]: i["column_names"] for i in inspector.get_indexes(table.name) if not i["unique"]},
            sorted(u["column_names"] for u in inspector.get_unique_constraints(table.name)),
            inspector.get_pk_constraint(table.name)["constrained_columns"],
        )
    engine.dispose()
    return shape


def test_a_migrated_database_has_the_tables_of_a_new_one(tmp_path):
    old, new = url_of(tmp_path / "old"), url_of(tmp_path / "new")
    for directory in ("old", "new"):
        (tmp_path / directory).mkdir()
    version_0.make(old, now())
    for _ in range(2):  # the second time there is nothing to do
        Database(old).close()
    Database(new).close()
    assert shape_of(old) == shape_of(new)


def test_everything_is_there_and_sizes_are_known(tmp_path):
    root = tmp_path / "server"
    root.mkdir()
    version_0.make(url_of(root), now())
    for directory in ("models/s-train-0/9", "samplers/s/4"):
        (root / directory).mkdir(parents=True)
        state = '{"value": 1.5, "gradient": 0.0, "steps": 3, "rank": 4}'
        (root / directory / "adapter_config.json").write_text(state)

    async def main():
        async with living(root) as service:
            database = service.database
            assert [len(database.find(table)) for table in TABLES] == [1, 2, 2, 1, 2]
            assert database.get(sessions, "s").user_metadata == {"a": 1}
            assert database.get(models, "s:train:0").lora["targets"] == ["q_proj"]
            assert database.get(models, "s:train:0").snapshot_bytes == len(state)
            assert [row.num_bytes for row in database.find(requests, order=requests.c.number)] == [2, 4]
            assert database.get(checkpoints, "tinker://s:train:0/weights/x").public is False
            assert service.quotas.used("me") == 2 * len(state) + 12 + 2 + 4
            await train(service, "s:train:0", 100)
            first = min(r.number for r in database.find(requests, requests.c.target == "s:train:0"))
            assert first > 9  # a number after the snapshot's, whatever rows there were
        async with living(root) as service:
            assert await value_of(service, "s:train:0", 110) == pytest.approx(1.8)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["error", "death"])
def test_a_migration_that_is_interrupted_anywhere_is_done_at_the_next_start(tmp_path, monkeypatch, kind):
    """Before each of its statements."""
    plain, k = migrations.STEPS[0], -1
    done = False
    while not done:
        k += 1
        root = tmp_path / str(k)
        root.mkdir()
        version_0.make(url_of(root), now())

        def interrupted(connection, left=k):
            nonlocal done
            count = 0

            def before(*_args):
                nonlocal count
                count += 1
                if count > left:
                    raise KeyboardInterrupt if kind == "death" else RuntimeError("no")

            event.listen(connection, "before_cursor_execute", before)
            try:
                plain(connection)
                done = True
            finally:
                event.remove(connection, "before_cursor_execute", before)

        with monkeypatch.context() as patch:
            patch.setattr(migrations, "STEPS", (interrupted,))
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                Database(url_of(root)).close()
        database = Database(url_of(root))
        assert [len(database.find(table)) for table in TABLES] == [1, 2, 2, 1, 2], k
        database.close()
        k += 4  # not each: a database for each of them
    assert k > 20


def test_a_newer_servers_database_is_refused(tmp_path):
    url = url_of(tmp_path)
    Database(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE schema_version SET version = 99")
    engine.dispose()
    with pytest.raises(
        ConfigError, match=r"tables of version 99, this server knows versions up to \d+: use the"
    ):
        Database(url)


def test_a_number_is_never_used_again(tmp_path):
    """Or a restart takes what has that number for older than the model's snapshot, and does not do it again."""
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            session = service.create_session("me", None, None)
            first = await make_model(service, session)
            await value_of(service, first, 1)
            path = f"tinker://{first}/weights/value-1"
            id = service.create_model_from("me", session, 1, path, True, {"path": path})
            assert (await service.queue.wait(id, "me", 5)).state == "done"
        async with living(root, Limits(keep_seconds=1e-9)) as service:
            await service.retention.sweep()
            assert not service.database.find(requests)
            await train(service, f"{session}:train:1", 1)
        async with living(root) as service:
            assert await value_of(service, f"{session}:train:1", 10) == pytest.approx(0.3)

    asyncio.run(main())
