"""What nobody uses goes: once, in pieces, and all of it, wherever the server is killed."""

# holds: exact, counts of rows and statements

import asyncio
import math
import shutil
import threading
from functools import partial

import httpx
import pytest
from sqlalchemy import event

from rl.tinker.connection import Unavailable
from rl.tinker.database import checkpoints
from tests.tinker.test_protocol import request_body
from tests.tinker.test_quotas import SAMPLE
from tests.tinker.test_tenants import FAILS, Mortal, submit

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.tinker.app import make_app
from rl.tinker.backend import NotFound
from rl.tinker.checkpoints import MOST_LISTED
from rl.tinker.database import Database, models, now, requests, samplers, sessions
from rl.tinker.limits import Limits
from rl.tinker.quotas import size_of
from rl.tinker.routes import Served
from rl.types import SamplingParams
from tests.tinker.databases import url_of
from tests.tinker.lives import LORA, ME, NAME, answered, living, make_model, save, train, value_of
from tests.tinker.test_restart import Dead, MortalDatabase

AT_ONCE = 1e-9


class Statements:
    """How many a database executes."""

    def __init__(self, database):
        self.count = 0
        event.listen(database._connection._engine, "before_cursor_execute", self._add)

    def _add(self, *_args):
        self.count += 1


@pytest.mark.parametrize(("has_models", "count"), [(False, 250), (True, 40)])
def test_an_old_session_costs_nothing_the_second_time(tmp_path, has_models, count):
    async def main():
        async with living(tmp_path / "server", Limits(keep_seconds=AT_ONCE)) as service:
            for _ in range(count):
                session = service.create_session(ME, None, None)
                service.create_sampler(ME, session, 0, NAME, None)
                if has_models:
                    await make_model(service, session)
            await service.retention.sweep()
            await service.retention.sweep()
            assert len(service.database.find(sessions)) == count * has_models
            assert not service.database.find(samplers)
            statements = Statements(service.database)
            await service.retention.sweep()
            assert statements.count < 10

    asyncio.run(main())


def test_a_session_that_is_used_again_ends_again(tmp_path):
    root = tmp_path / "server"

    async def main():
        async with living(root, Limits(keep_seconds=3600.0)) as service:
            session = service.create_session(ME, None, None)
            model = await make_model(service, session)
            for seq in (1, 2, 3):
                await save(service, "save_weights_for_sampler", model, seq, sampling_session_seq_id=seq)
                assert len(list((root / "samplers" / session).iterdir())) == 1
                assert service.database.get(sessions, session).ended is None
                service.database.update(sessions, sessions.c.id == session, seen=1.0)
                await service.retention.sweep()
                assert not list((root / "samplers").iterdir()) and not service.list_samplers(session)
                assert service.database.get(sessions, session).ended

    asyncio.run(main())


def test_a_session_that_is_in_use_stays(tmp_path):
    async def main():
        async with living(tmp_path / "server", Limits(keep_seconds=3600.0)) as service:
            session = service.create_session(ME, None, None)
            sampler = service.create_sampler(ME, session, 0, NAME, None)
            await service.retention.sweep()
            service.heartbeat(ME, session)
            assert service.sampler(ME, sampler)

    asyncio.run(main())


def unused(service, model):
    """As if thirty days had gone."""
    service.database.update(models, models.c.id == model, seen=now() - 31 * 24 * 3600)


def test_a_model_that_nobody_used_goes_with_all_that_is_its_own(tmp_path):
    root = tmp_path / "server"

    async def main():
        async with living(root, Limits(snapshot_every=1)) as service:
            session = service.create_session(ME, None, None)
            gone, kept = [await make_model(service, session, i) for i in range(2)]
            service.database.update(models, models.c.id == gone, user_metadata={"renderer": "qwen3"})
            for model in (gone, kept):
                await train(service, model, 1)
                await save(service, "save_weights", model, 3, path="named")
            unused(service, gone)
            for act in (
                lambda: service.model(ME, gone),
                lambda: service.create_model(ME, session, 0, NAME, LORA),
                lambda: service.save(ME, "save_weights", gone, 9, {}),
            ):  # at once, not at the next sweep: it goes in pieces
                with pytest.raises(NotFound, match="not used for too long"):
                    act()
            for model in (gone, kept):  # a checkpoint of it is left
                assert service.training_run(ME, model).id == model
            assert {row.id for row in service.list_models(ME, 10, 0)} == {gone, kept}
            assert service.count_models(ME) == 2
            await service.retention.sweep()
            assert service.database.get(models, gone)  # in the engine
        async with living(root) as service:
            before = service.quotas.used(ME)
            await service.retention.sweep()
            left = service.database.get(models, gone)
            assert left.snapshot is None and left.snapshot_bytes == 0
            assert service.quotas.used(ME) < before
            assert service.training_run(ME, gone).user_metadata == {"renderer": "qwen3"}
            with pytest.raises(NotFound):
                service.model(ME, gone)
            assert not service.database.find(requests, requests.c.target == gone)
            assert [path.name for path in (root / "models").iterdir()] == [f"{session}-train-1"]
            assert await value_of(service, kept, 10) == pytest.approx(0.3)
            path = f"tinker://{gone}/weights/named"
            id = service.create_model_from(ME, session, 5, path, True, {"path": path})
            await answered(service, id)
            assert await value_of(service, f"{session}:train:5", 1) == pytest.approx(0.3)
            assert service.database.get(sessions, session)
            used = service.quotas.used(ME)
            await service.retention.sweep()
            assert service.quotas.used(ME) == used
            await service.checkpoints.delete(service.checkpoints.own(ME, gone, "weights", "named"))
            await service.retention.sweep()
            assert service.database.get(models, gone) is None
            with pytest.raises(NotFound, match="no training run"):
                service.training_run(ME, gone)
            assert [row.id for row in service.list_models(ME, 10, 0)] == [f"{session}:train:5", kept]

    asyncio.run(main())


def test_the_last_model_of_a_session_that_is_over_takes_it_along(tmp_path):
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            session = service.create_session(ME, None, None)
            model = await make_model(service, session)
            await service.finish_session(ME, session)
            unused(service, model)
        async with living(root) as service:
            await service.retention.sweep()
            assert not service.database.find(sessions) and not service.database.find(models)

    asyncio.run(main())


def test_a_session_goes_though_checkpoints_of_its_models_are_left(tmp_path):
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            session = service.create_session(ME, None, None)
            model = await make_model(service, session)
            await save(service, "save_weights", model, 1, path="named")
            await service.finish_session(ME, session)
            unused(service, model)
        async with living(root, Limits(keep_models_seconds=1e12)) as service:  # longer than there is time
            service.database.update(models, models.c.id == model, seen=0.0)
            with pytest.raises(NotFound):
                service.model(ME, model)
            await service.retention.sweep()
            assert not service.database.find(sessions)
            assert service.training_run(ME, model).id == model
            assert service.checkpoints.own(ME, model, "weights", "named")

    asyncio.run(main())


def test_wherever_a_sweep_is_killed_the_next_one_finishes_it(tmp_path):
    """Before each change: nobody sees half a model, and nothing is left."""
    k = -1
    while True:
        k += 1
        root = tmp_path / str(k)

        async def prepare(root=root):
            async with living(root, Limits(snapshot_every=1)) as service:
                session = service.create_session(ME, None, None)
                model = await make_model(service, session)
                await train(service, model, 1)
                await save(service, "save_weights_for_sampler", model, 3, sampling_session_seq_id=1)
                unused(service, model)
                service.database.update(sessions, sessions.c.id == session, seen=1.0)
            return model

        model = asyncio.run(prepare())
        database = MortalDatabase(url_of(root), math.inf)

        async def die(root=root, database=database, k=k, model=model):
            async with living(root, database=database) as service:
                database.left = k
                try:
                    await service.retention.sweep()
                    return False
                except Dead:
                    database.left = math.inf
                    with pytest.raises(NotFound):
                        service.model(ME, model)
                    return True

        died = asyncio.run(die())
        if not died:
            break

        async def finish(root=root):
            async with living(root) as service:
                await service.retention.sweep()
                await service.retention.sweep()
                assert not any(service.database.find(table) for table in (models, sessions, samplers))
                assert [row.target for row in service.database.find(requests)] == []
                assert not list(root.rglob("adapter_config.json"))
                assert service.quotas.used(ME) == 0

        asyncio.run(finish())
    assert k >= 4


def test_a_sweep_lets_others_work_between_its_pieces(tmp_path):
    num_rows = 3000

    async def main():
        async with living(tmp_path / "server", Limits(keep_seconds=3600.0)) as service:
            row = {
                "tenant": ME,
                "kind": "sample",
                "target": "x",
                "state": "done",
                "result": b"1",
                "created": 1.0,
            }
            rows = [
                row | {"id": f"x:{i}", "finished": 1.0 + i, "num_bytes": 1, "deaths": 0}
                for i in range(num_rows)
            ]
            service.database.change(
                requests.insert().values(rows[:2000]), requests.insert().values(rows[2000:])
            )
            turns = 0

            async def work():
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            working = asyncio.create_task(work())
            await service.retention.sweep()
            working.cancel()
            assert not service.database.find(requests)
            assert turns >= num_rows / 200

    asyncio.run(main())


def test_lists_come_in_pages(tmp_path):
    async def main():
        async with living(tmp_path / "server") as service:
            ids = [service.create_session(ME, None, None) for _ in range(7)]
            for i, id in enumerate(ids):
                service.database.update(sessions, sessions.c.id == id, created=float(i))
            pages = [service.list_sessions(ME, 3, offset) for offset in (0, 3, 6, 9)]
            assert [[row.id for row in page] for page in pages] == [
                ids[6:3:-1], ids[3:0:-1], ids[:1], []
            ]  # fmt: skip
            assert service.list_sessions(ME, 0, 0) == []

    asyncio.run(main())


def test_every_question_has_an_index(tmp_path):
    """SQLite says how it would answer: with a million requests, a scan of them is seconds."""
    database = Database(f"sqlite:///{tmp_path}/plans.db")
    scanned, plans = [], []

    def explain(_connection, cursor, statement, parameters, *_rest):
        if statement.startswith(("SELECT", "UPDATE", "DELETE")) and "sqlite_master" not in statement:
            plan = [
                row[3] for row in cursor.connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]
            plans.append(statement)
            scanned.extend(
                (line, statement) for line in plan if line.startswith("SCAN ") and "USING" not in line
            )
            if "TEMP B-TREE" in str(plan) and "requests" in statement:
                scanned.append((str(plan), statement))

    async def main():
        async with living(
            tmp_path / "server", Limits(snapshot_every=1, max_models=1), database=database
        ) as service:
            event.listen(database._connection._engine, "before_cursor_execute", explain)
            session = service.create_session(ME, None, None)
            for i in range(2):
                model = await make_model(service, session, i)
                await train(service, model, 1)
                await save(service, "save_weights", model, 3, path="x")
                await save(
                    service, "save_weights_for_sampler", model, 4, sampling_session_seq_id=i, kind="inflight"
                )
                unused(service, model)
            await service.queue.ended_after(model, 0, 0.0)
            service.queue.last_failed(ME, 10)
            for listed in (service.list_models, service.list_sessions):
                listed(ME, 10, 0)
            service.count_models(ME)
            service.checkpoints.list(ME), service.checkpoints.list(ME, model), service.checkpoints.count(ME)
            await service.finish_session(ME, session)
            await service.retention.sweep()

    asyncio.run(main())
    assert len(plans) > 60 and scanned == []


async def save_in_flight(service, model, number):
    asked = {"sampling_session_seq_id": number, "kind": "inflight"}
    await save(service, "save_weights_for_sampler", model, number, **asked)


def test_weights_in_flight_take_the_place_of_those_before(tmp_path):
    async def main():
        async with living(tmp_path / "server") as service:
            session = service.create_session(ME, None, None)
            model = await make_model(service, session)
            for number in range(1, 6):
                await save_in_flight(service, model, number)
            rows = service.database.find(samplers)
            assert len(rows) == 5 and len({row.directory for row in rows}) == 1
            (there,) = (tmp_path / "server" / "samplers").glob("*/*")
            assert there == tmp_path / "server" / rows[0].directory
            assert sum(row.num_bytes for row in rows) == size_of(there) > 0
            await service.finish_session(ME, session)
            assert not there.exists()

    asyncio.run(main())


def test_a_sample_whose_weights_move_on_before_it_has_read_them_is_drawn_with_the_newest(tmp_path):
    async def main():
        async with living(tmp_path / "server") as service:
            model = await make_model(service, service.create_session(ME, None, None))
            await save_in_flight(service, model, 1)
            (row,) = service.database.find(samplers)
            newest = partial(service.sampling._directory_of, row.id)
            sample = service.sampling._with(ME, row.directory, 1, newest)
            for number in (2, 3):
                await save_in_flight(service, model, number)
            assert not (tmp_path / "server" / row.directory).exists()
            (completion,) = await sample([1], 1, SamplingParams(1, seed=0))
            assert len(completion.tokens) == 1

    asyncio.run(main())


def test_a_checkpoint_saved_again_while_a_sweep_removes_others_stays(tmp_path, monkeypatch):
    """The sweep knows the expired one of that name; the new one is another."""

    async def main():
        async with living(tmp_path / "server") as service:
            model = await make_model(service, service.create_session(ME, None, None))
            for seq_id, name in enumerate(("first", "latest"), 1):
                await save(service, "save_weights", model, seq_id, path=name)
            for i, row in enumerate(service.checkpoints.list(ME)[::-1]):
                service.checkpoints.change(row, expires=1.0 + i)

            remove, is_saved = service.checkpoints._remove, False

            async def slowly(checkpoint):
                nonlocal is_saved
                if not is_saved:
                    is_saved = True
                    await save(service, "save_weights", model, 3, path="latest")
                await remove(checkpoint)

            monkeypatch.setattr(service.checkpoints, "_remove", slowly)
            await service.checkpoints.sweep()
            (kept,) = service.checkpoints.list(ME)
            assert kept.name == "latest" and (tmp_path / "server" / kept.directory).is_dir()
            on_disk = service.database.find(requests), service.database.find(models)
            used = kept.num_bytes + sum(row.num_bytes for row in on_disk[0])
            assert service.quotas.used(ME) == used + sum(row.snapshot_bytes or 0 for row in on_disk[1])

    asyncio.run(main())


def test_no_directory_is_removed_in_the_event_loop(tmp_path, monkeypatch):
    """It may hold gigabytes: deleted, overwritten, and expired checkpoints."""
    rmtree, on_loop = shutil.rmtree, []

    def watched(*args, **kwargs):
        if threading.current_thread() is threading.main_thread():
            on_loop.append(args)
        rmtree(*args, **kwargs)

    async def main():
        async with living(tmp_path / "server") as service:
            model = await make_model(service, service.create_session(ME, None, None))
            monkeypatch.setattr(shutil, "rmtree", watched)
            await save(service, "save_weights", model, 1, path="a")
            await save(service, "save_weights", model, 2, path="a", overwrite=True)
            await save(service, "save_weights", model, 3, path="b", ttl_seconds=1)
            await service.checkpoints.delete(service.checkpoints.list(ME)[1])
            service.checkpoints.change(service.checkpoints.list(ME)[0], expires=1.0)
            await service.checkpoints.sweep()
            assert not list((tmp_path / "server").glob("checkpoints/*/*/*")) and not on_loop

    asyncio.run(main())


def test_a_page_of_training_runs_takes_as_many_statements_as_one(tmp_path):
    """A page of a thousand models held the event loop up for three statements each."""

    async def main():
        async with living(tmp_path / "server") as service:
            app = make_app(service, None, Served((NAME,), None, "qwen3", 64))
            transport = httpx.ASGITransport(app)
            http = httpx.AsyncClient(transport=transport, base_url="http://server/api/v1")
            session = service.create_session("local", None, None)
            made = [await make_model(service, session, i, "local") for i in range(4)]
            for seq_id, name in ((1, "old"), (2, "new")):
                await save(service, "save_weights", made[1], seq_id, "local", path=name)
            await save(service, "save_weights_for_sampler", made[1], 3, "local", path="sampler")
            statements, counts = Statements(service.database), []
            for limit in (1, 4):
                before = statements.count
                answer = await http.get("/training_runs", params={"limit": limit})
                counts.append(statements.count - before)
            assert counts[0] == counts[1]
            last = {
                run["training_run_id"]: [
                    run[name] and run[name]["checkpoint_id"]
                    for name in ("last_checkpoint", "last_sampler_checkpoint")
                ]
                for run in answer.json()["training_runs"]
            }
            none = [None, None]
            assert last == dict.fromkeys(made, none) | {made[1]: ["weights/new", "sampler_weights/sampler"]}
            for path in ("training_runs", "checkpoints"):  # who pages by the cursor skips nothing
                answer = await http.get(f"/{path}", params={"limit": MOST_LISTED + 1, "offset": -3})
                cursor = answer.json()["cursor"]
                assert (cursor["limit"], cursor["offset"]) == (MOST_LISTED, 0)

    asyncio.run(main())


def test_what_a_model_is_restored_from_outlasts_the_results_and_the_rest_goes(tmp_path):
    """A failure stays without its body: it has dropped the gradient of what came before it."""
    root = tmp_path / "server"

    async def main():
        async with living(root, Limits(keep_seconds=AT_ONCE), Mortal()) as service:
            session = service.create_session(ME, None, None)
            sampler = service.create_sampler(ME, session, 0, NAME, None)
            model = await make_model(service, session)
            await answered(service, service.sample(ME, sampler, 1, SAMPLE))
            await answered(service, submit(service, model, 1))
            await answered(service, submit(service, model, 2, 13), state="refused")
            await answered(service, submit(service, model, 3, FAILS), state="failed")
            await service.retention.sweep()
            left = {row.id: bytes(row.body) for row in service.database.find(requests)}
            assert left == {f"{model}:1": request_body(model, 1), f"{model}:3": b""}
        async with living(root) as service:
            await train(service, model, 4)
            assert await value_of(service, model, 6) == pytest.approx(0.3)

    asyncio.run(main())


def test_each_snapshot_takes_the_place_of_the_one_before(tmp_path):
    """After every second step: neither older files are left nor what they were followed by."""
    root = tmp_path / "server"

    async def main():
        async with living(root, Limits(snapshot_every=2)) as service:
            model = await make_model(service, service.create_session(ME, None, None))
            for seq_id in (1, 3, 5, 7, 9):
                await train(service, model, seq_id)
            body = request_body(model, 20)
            await answered(service, service.submit(ME, "forward", model, 20, body))
            assert [verb for verb, _ in service.backend.log].count("save") == 2
            row = service.database.get(models, model)
            (there,) = (root / "models").glob("*/*")
            assert there == root / row.snapshot and row.snapshot_bytes == size_of(there)
            with_body = requests.c.target == model, requests.c.body.is_not(None)
            kept = service.database.find(requests, *with_body, order=requests.c.number)
            assert [row.id for row in kept] == [f"{model}:9", f"{model}:10"]

    asyncio.run(main())


def test_an_end_in_good_order_writes_nothing_of_requests_that_have_ended(tmp_path):
    async def main():
        async with living(tmp_path / "server") as service:
            session = service.create_session(ME, None, None)
            sampler = service.create_sampler(ME, session, 0, NAME, None)
            await train(service, await make_model(service, session), 1)
            await answered(service, service.sample(ME, sampler, 1, SAMPLE))
            statements = Statements(service.database)
            service.queue.stop()
            assert statements.count == 0

    asyncio.run(main())


def test_a_heartbeat_keeps_a_session_and_a_request_keeps_a_model(tmp_path, monkeypatch):
    """And a session that was over ends once more, with the sampler that it has had since."""

    async def main():
        async with living(tmp_path / "server", Limits(keep_seconds=3600.0)) as service:
            session = service.create_session(ME, None, None)
            sampler = service.create_sampler(ME, session, 0, NAME, None)
            trained, other = [await make_model(service, session, i) for i in range(2)]
            service.database.update(sessions, sessions.c.id == session, seen=1.0)
            service.database.update(models, models.c.session == session, seen=now() - 24 * 3600)
            service.heartbeat(ME, session)
            await train(service, trained, 1)
            await service.retention.sweep()
            assert service.sampler(ME, sampler)

            await service.finish_session(ME, session)
            again = service.create_sampler(ME, session, 1, NAME, None)
            await service.retention.sweep()
            assert service.sampler(ME, again)
            service.database.update(sessions, sessions.c.id == session, seen=1.0)
            await service.retention.sweep()
            with pytest.raises(NotFound):
                service.sampler(ME, again)

            later = now() + 29.5 * 24 * 3600
            monkeypatch.setattr("rl.tinker.retention.now", lambda: later)
            assert service.model(ME, trained)
            with pytest.raises(NotFound, match="not used for too long"):
                service.model(ME, other)

    asyncio.run(main())


def test_a_model_that_has_begun_to_go_is_gone_whatever_the_setting_is_later_and_gives_its_room_back(
    tmp_path, monkeypatch
):
    root = tmp_path / "server"

    async def main():
        async with living(root, Limits(snapshot_every=1)) as service:
            model = await make_model(service, service.create_session(ME, None, None))
            for seq_id in (1, 3):  # the second comes after the snapshot of the first
                await train(service, model, seq_id)
            unused(service, model)
        async with living(root) as service:
            assert service.database.get(models, model).snapshot_bytes > 0
            forget = service.queue.forget_target

            def die(target):
                forget(target)
                raise Dead

            with monkeypatch.context() as patch, pytest.raises(Dead):
                patch.setattr(service.queue, "forget_target", die)
                await service.retention.sweep()
        async with living(root, Limits(keep_models_seconds=1e12)) as service:
            with pytest.raises(NotFound):
                service.model(ME, model)
            await service.retention.sweep()
            assert service.database.get(models, model) is None
            assert service.quotas.used(ME) == 0

    asyncio.run(main())


def test_a_server_sweeps_by_itself_and_goes_on_after_an_outage(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.tinker.retention._SWEEP_SECONDS", 0.01)

    async def main():
        async with living(tmp_path / "server") as service:
            model = await make_model(service, service.create_session(ME, None, None))
            await save(service, "save_weights", model, 1, path="old")
            (row,) = service.checkpoints.list(ME)
            sweep, outages = service.checkpoints.sweep, [Unavailable("the database is away")]

            async def at_the_second_time():
                if outages:
                    raise outages.pop()
                return await sweep()

            monkeypatch.setattr(service.checkpoints, "sweep", at_the_second_time)
            service.checkpoints.change(row, expires=1.0)
            for _ in range(400):
                if not service.database.find(checkpoints):
                    break
                await asyncio.sleep(0.005)
            assert not outages and not service.database.find(checkpoints)

    asyncio.run(main())
