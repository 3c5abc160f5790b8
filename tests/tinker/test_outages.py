"""A database that is away or full: nothing that was answered is lost or done twice, clients are told to ask again."""

# holds: exact, the fake backend counts in float64

import asyncio
import contextlib
import threading
import time

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from tests.tinker import lives
from tests.tinker.test_protocol import request_body

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.errors import ConfigError  # noqa: E402
from rl.tinker import connection  # noqa: E402
from rl.tinker.backend import UserError  # noqa: E402
from rl.tinker.connection import Unavailable  # noqa: E402
from rl.tinker.database import Database, models, requests, sessions  # noqa: E402
from rl.tinker.limits import Limits  # noqa: E402
from tests.tinker import postgres  # noqa: E402
from tests.tinker.databases import url_of  # noqa: E402
from tests.tinker.fakes import serving  # noqa: E402
from tests.tinker.lives import ME, NAME, answered, living, make_model, train, value_of  # noqa: E402
from tests.tinker.test_protocol import ADAM, client, datum, post  # noqa: E402
from tests.tinker.test_protocol import value_of as sdk_value_of  # noqa: E402
from tests.tinker.test_quotas import SAMPLE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class FullDatabase(Database):
    """Takes nothing new from its k-th statement on, for so many statements; reads too where it is away."""

    def __init__(self, url):
        self.left, self.refusals, self.is_away = float("inf"), 0, False
        super().__init__(url)

    def _run(self, statement, values=None, changes=False):
        self._live(changes)
        return super()._run(statement, values, changes)

    def change(self, *statements, durable=False):
        self._live(True)
        super().change(*statements, durable=durable)

    def _live(self, changes):
        if not (changes or self.is_away):
            return
        self.left -= 1
        if self.left < 0 and self.refusals > 0:
            self.refusals -= 1
            raise Unavailable("database or disk is full")


@pytest.fixture
def no_rest(monkeypatch):
    for module in ("requests", "database", "app"):
        monkeypatch.setattr(f"rl.tinker.{module}._REST_SECONDS", 0.001)
    monkeypatch.setattr("tinker._base_client.INITIAL_RETRY_DELAY", 0.05)


async def insist(call):
    """As a client does that is answered 503."""
    while True:
        try:
            result = call()
            return await result if asyncio.iscoroutine(result) else result
        except Unavailable:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("is_away", [False, True])
def test_wherever_the_database_fails_for_a_while_every_optim_step_is_done_once(tmp_path, no_rest, is_away):
    """From every ninth statement on. Also as a restart sees it."""
    for k in range(0, 1000, 9):
        root = tmp_path / str(k)
        root.mkdir()
        database = FullDatabase(url_of(root))
        database.is_away = is_away

        async def life(root=root, database=database, k=k):
            async with living(root, Limits(snapshot_every=2, max_models=1), database=database) as service:
                session = service.create_session(ME, None, None)
                database.left, database.refusals = k, 7
                made = [
                    await insist(lambda i=i: make_model(service, session, i)) for i in range(2)
                ]  # one in the engine at a time
                sampler = await insist(lambda: service.create_sampler(ME, session, 0, NAME, None))
                for step in range(4):
                    await insist(lambda step=step: train(service, made[step % 2], 2 * step + 1))
                    id = await insist(lambda step=step: service.sample(ME, sampler, step, SAMPLE))
                    await insist(lambda id=id: answered(service, id))
                finished = database.refusals > 0
                database.refusals = 0
                values = [await value_of(service, model, 100) for model in made]
            return session, values, finished

        session, values, finished = asyncio.run(life())
        assert values == pytest.approx([0.6, 0.6]), k

        async def again(root=root, session=session):
            async with living(root) as service:
                return [await value_of(service, f"{session}:train:{i}", 200) for i in range(2)]

        assert asyncio.run(again()) == pytest.approx([0.6, 0.6]), k
        if finished:  # it never came to it
            break
    assert k > 20


def test_a_full_disk_costs_a_sample_a_while_and_no_restart(tmp_path, no_rest):
    async def main():
        database = FullDatabase(url_of(tmp_path / "server"))
        async with living(tmp_path / "server", database=database) as service:
            session = service.create_session(ME, None, None)
            sampler = service.create_sampler(ME, session, 0, NAME, None)
            id = service.sample(ME, sampler, 1, SAMPLE)
            database.left, database.refusals = 0, 5
            await answered(service, id)
            assert database.refusals == 0

    (tmp_path / "server").mkdir()
    asyncio.run(main())


def test_an_outage_while_a_model_is_restored_costs_nobody_a_step(tmp_path, no_rest):
    """At the first of the requests that are done again, at the second, ..."""

    async def main(k, root):
        async with living(root) as service:
            model = await make_model(service, service.create_session(ME, None, None))
            for i in range(3):
                await train(service, model, 2 * i + 1)
        async with living(root) as service:
            body, left = service.queue.body, k

            def away_once(request):
                nonlocal left
                left -= 1
                if left == 0:
                    raise Unavailable("the database does not work (restart); the same may work in a minute")
                return body(request)

            service.queue.body = away_once
            await train(service, model, 7)
            assert left <= 0 and await value_of(service, model, 9) == pytest.approx(4 * 0.3)

    for k in range(1, 7):
        asyncio.run(main(k, tmp_path / str(k)))


def test_a_client_is_told_to_ask_again(tmp_path, no_rest):
    with serving(tmp_path / "server") as (url, _):
        training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
        plain = Database._run
        refusals = [4]

        def refuse(self, *args, **kwargs):
            if refusals[0]:
                refusals[0] -= 1
                raise Unavailable("the database does not work (no); the same may work in a minute")
            return plain(self, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Database, "_run", refuse)
            answer = post(url, "get_info", {"model_id": training.model_id})
            assert answer.status_code == 503 and answer.json()["category"] == "server"
            training.forward_backward([datum()], "cross_entropy")
            training.optim_step(ADAM).result()  # the SDK's own retries
        assert not refusals[0] and sdk_value_of(training) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "values",
    [
        {"id": "a\0b"},
        {"id": "\ud800"},
        {"id": "x" * 201},
        {"display_name": "\0"},
        {"display_name": "\udfff"},
        {"user_metadata": {"a": float("nan")}},
        {"user_metadata": {"\ud800": 1}},
    ],
)
def test_what_no_database_takes_is_the_clients_error(tmp_path, values):
    with contextlib.closing(Database(url_of(tmp_path))) as database:
        row = {"id": "id", "tenant": ME, "created": 1.0, "seen": 1.0} | values
        with pytest.raises(UserError):
            database.insert(sessions, **row)
        if "id" in values:
            with pytest.raises(UserError):
                database.get(sessions, values["id"])
        assert database.find(sessions) == []
        database.insert(
            sessions, **row | {"id": "é" * 200, "display_name": "\U0001f600", "user_metadata": {"é": 1}}
        )
        assert database.get(sessions, "é" * 200).user_metadata == {"é": 1}


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
def test_a_number_that_is_too_large_is_the_clients_error(tmp_path, number):
    with contextlib.closing(Database(url_of(tmp_path))) as database:
        row = {
            "id": "a",
            "session": "s",
            "tenant": ME,
            "lora": {},
            "source_optimizer": False,
            "snapshot_number": 0,
        }
        with pytest.raises(UserError):
            database.insert(models, **row, seed=number, created=1.0, seen=1.0)


def test_a_statement_that_is_wrong_is_an_error_and_not_an_outage(tmp_path):
    wrong = pytest.raises((OperationalError, ProgrammingError))
    with contextlib.closing(Database(url_of(tmp_path))) as database, wrong:
        database.rows(text("SELECT nothing FROM nowhere"))


# ---- PostgreSQL alone


@pytest.fixture
def of_postgres(database_kind):
    if database_kind != "postgres":
        pytest.skip("SQLite has no connection to lose")


def end_connections(url):
    """As an administrator does, or a failing network."""
    with postgres.shared()._admin() as admin:
        name = url.partition("@/")[2].partition("?")[0]
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        assert admin.execute(query, [name]).fetchall()


def test_a_connection_that_was_lost_is_made_again_and_nobody_notices(tmp_path, of_postgres):
    url = url_of(tmp_path)
    with contextlib.closing(Database(url)) as database:
        row = {"tenant": ME, "created": 1.0, "seen": 1.0}
        end_connections(url)
        database.insert(sessions, id="a", **row)
        end_connections(url)
        assert database.get(sessions, "a").seen == 1.0
        end_connections(url)
        database.change(
            sessions.insert().values(id="b", **row), sessions.delete().where(sessions.c.id == "a")
        )
        assert [row.id for row in database.find(sessions)] == ["b"]


def test_two_servers_never_have_one_database(tmp_path, of_postgres, monkeypatch):
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 0.1)
    url = url_of(tmp_path)
    with contextlib.closing(Database(url)) as database:
        with pytest.raises(ConfigError, match="in use by another server; give each server one of its own"):
            Database(url)
        end_connections(url)
        assert database.find(sessions) == []
        with pytest.raises(ConfigError, match="in use"):
            Database(url)
    Database(url).close()


@pytest.mark.parametrize("together", [False, True])
def test_an_insert_whose_answer_was_lost_is_there_once(tmp_path, of_postgres, together):
    url = url_of(tmp_path)
    with contextlib.closing(Database(url)) as database:
        row = {"id": "a", "tenant": ME, "kind": "k", "target": "t", "state": "waiting", "created": 1.0}
        lost = []

        def lose(_connection, cursor, statement, *_rest):
            if statement.startswith("COMMIT" if together else "INSERT") and not lost:
                lost.append(statement)
                end_connections(url)
                cursor.execute("SELECT 1")  # the answer is not read

        event.listen(database._connection._engine, "after_cursor_execute", lose)
        if together:
            database.change(requests.insert().values(**row))
        else:
            database.insert(requests, **row)
        assert lost and [row.id for row in database.find(requests)] == ["a"]


def test_a_statement_that_takes_too_long_ends(tmp_path, of_postgres, monkeypatch):
    monkeypatch.setattr(connection, "_STATEMENT_SECONDS", 0.1)
    with contextlib.closing(Database(url_of(tmp_path))) as database:
        with pytest.raises(Unavailable, match="statement timeout"):
            database.rows(text("SELECT pg_sleep(30)"))
        assert database.find(sessions) == []


def test_clients_sit_out_a_database_that_is_killed_and_started_again(tmp_path, of_postgres, monkeypatch):
    """Three times, under a client of the official SDK."""
    for module in ("requests", "database", "app"):
        monkeypatch.setattr(f"rl.tinker.{module}._REST_SECONDS", 0.1)
    monkeypatch.setattr("tinker._base_client.INITIAL_RETRY_DELAY", 0.05)
    settings = ("fsync=off", "shared_buffers=16MB")
    with (
        postgres.postgres(settings) as server,
        serving(tmp_path / "server", database_url=server.url("one")) as (url, _),
    ):
        value = []

        def work():
            training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
            for _ in range(40):
                training.forward_backward([datum()], "cross_entropy")
                training.optim_step(ADAM).result()
                time.sleep(0.02)
            value.append(sdk_value_of(training))

        working = threading.Thread(target=work, daemon=True)
        working.start()
        for _ in range(3):
            time.sleep(0.4)
            server.kill()
            time.sleep(0.3)
            server.start()
        working.join(100)
        assert value == [pytest.approx(40 * 0.3)]


def test_a_database_that_is_there_and_does_not_answer_holds_the_server_up_once(
    tmp_path, of_postgres, monkeypatch
):
    """Later calls are told at once; when it goes on, what it was sent is there once."""
    monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(connection, "_AT_ONCE_SECONDS", 0.1)
    row = {"tenant": ME, "created": 1.0, "seen": 1.0}
    with contextlib.closing(Database(url_of(tmp_path))) as database:
        with postgres.shared().stopped():
            with pytest.raises(Unavailable, match="does not answer"):
                database.insert(sessions, id="a", **row)
            connecting = database._connection._connecting
            for _ in range(5):
                with pytest.raises(Unavailable, match="does not answer"):
                    database.find(sessions)
            assert database._connection._connecting is connecting and not connecting.done()

        rows = asyncio.run(insist(lambda: database.find(sessions)))
        assert [row.id for row in rows] == ["a"]  # who is answered 503 looks before it asks again


class NoResults(Database):
    """Takes no result, so many times; all else."""

    refusals = 0.0

    def update(self, table, *where, **values):
        if self.refusals and "result" in values:
            self.refusals -= 1
            raise Unavailable("database or disk is full")
        super().update(table, *where, **values)


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_snapshot_is_named_before_the_results_of_its_requests_are_kept(tmp_path, no_rest, is_killed):
    """Else a restart would do the step once more, on what it has made."""
    root = tmp_path / "server"

    async def main():
        root.mkdir()
        database = NoResults(url_of(root))
        async with living(root, Limits(snapshot_every=1), database=database) as service:
            model = await make_model(service, service.create_session(ME, None, None))
            body = request_body(model, 1)
            await answered(service, service.submit(ME, "forward_backward", model, 1, body))
            database.refusals = float("inf")
            step = service.optim_step(ME, model, 2, lives.ADAM)
            later = service.submit(ME, "forward", model, 3, request_body(model, 3))
            await asyncio.sleep(0.1)
            assert service.backend.log[-1] == ("optim_step", model)
            assert database.get(models, model).snapshot is None
            if not is_killed:
                database.refusals = 0.0
                await answered(service, later)
                assert database.get(models, model).snapshot
        async with living(root) as service:
            await answered(service, step)
            assert await value_of(service, model, 9) == pytest.approx(0.3)

    asyncio.run(main())


def test_the_server_works_on_while_a_result_waits_to_be_written(tmp_path, no_rest):
    root, turns = tmp_path / "server", 0

    async def work():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def main():
        root.mkdir()
        database = NoResults(url_of(root))
        async with living(root, database=database) as service:
            sampler = service.create_sampler(ME, service.create_session(ME, None, None), 0, NAME, None)
            working = asyncio.create_task(work())
            database.refusals = 200
            await answered(service, service.sample(ME, sampler, 1, SAMPLE))
            working.cancel()
            assert database.refusals == 0 and turns >= 200

    asyncio.run(main())


@pytest.mark.parametrize("durable", [False, True])
def test_a_change_of_which_a_part_fails_is_undone_and_the_next_one_is_made(tmp_path, durable):
    with contextlib.closing(Database(url_of(tmp_path))) as database:
        row = {"tenant": ME, "created": 1.0, "seen": 1.0}
        database.insert(sessions, id="a", **row)
        other, again = (sessions.insert().values(id=id, **row) for id in ("b", "a"))
        with pytest.raises(IntegrityError):
            database.change(other, again, durable=durable)
        assert [row.id for row in database.find(sessions)] == ["a"]
        database.change(other, sessions.delete().where(sessions.c.id == "a"), durable=durable)
        assert [row.id for row in database.find(sessions)] == ["b"]
