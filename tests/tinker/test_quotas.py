"""What a tenant keeps is counted exactly, whatever is done in whatever order, and no more than a bound of it."""

# holds: exact, counts of bytes

import asyncio
import random
import re

import pytest
from sqlalchemy import func, select

from rl.tinker.database import now

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.tinker.backend import NotFound, UserError
from rl.tinker.database import checkpoints, models, requests, samplers, sessions
from rl.tinker.limits import Limits
from rl.tinker.quotas import Quotas
from tests.tinker.lives import ME, answered, living, make_model, save, train
from tests.tinker.test_protocol import request_body

SAMPLE = {
    "num_samples": 1,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    "sampling_params": {"max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 1},
}


def on_disk(root):
    while True:
        try:
            return sum(file.stat().st_size for file in root.rglob("adapter_config.json"))
        except FileNotFoundError:  # a snapshot goes meanwhile
            continue


def in_rows(database):
    """Bytes of bodies and results."""
    sizes = [
        func.coalesce(func.sum(func.length(column)), 0) for column in (requests.c.body, requests.c.result)
    ]
    return sum(map(int, database.rows(select(*sizes))[0]))


class Tenant:
    """Does anything that keeps or frees something."""

    def __init__(self, service, rng):
        self.service, self.rng, self.seq = service, rng, 0

    async def begin(self):
        self.session = self.service.create_session(ME, None, None)
        self.models = [await make_model(self.service, self.session, i) for i in range(3)]

    def next(self):
        self.seq += 2
        return self.rng.choice(self.models), self.seq

    async def train(self):
        await train(self.service, *self.next())

    async def be_refused(self):
        model, seq = self.next()
        body = request_body(model, seq, tokens=(13, 2, 3))
        await answered(
            self.service, self.service.submit(ME, "forward_backward", model, seq, body), state="refused"
        )

    async def save(self):
        kind = self.rng.choice(["save_weights", "save_weights_for_sampler"])
        await save(self.service, kind, *self.next(), path=self.rng.choice("xy"), overwrite=True)

    async def save_for_sampler(self):
        kind = self.rng.choice(["snapshot", "inflight"])
        await save(
            self.service,
            "save_weights_for_sampler",
            *self.next(),
            sampling_session_seq_id=self.seq,
            kind=kind,
        )

    async def sample(self):
        sampler = self.service.create_sampler(ME, self.session, 10**6, self.service.model_names[0], None)
        await answered(self.service, self.service.sample(ME, sampler, self.next()[1], SAMPLE))

    async def delete(self):
        for row in self.service.checkpoints.list(ME)[:1]:
            await self.service.checkpoints.delete(row)

    async def copy(self):
        for row in self.service.checkpoints.list(ME)[:1]:
            await self.service.copy_weights(ME, self.session, 9, row.path, None)

    async def expire(self):
        for row in self.service.checkpoints.list(ME)[:1]:
            self.service.checkpoints.change(row, expires=1.0)
        await self.service.retention.sweep()

    async def finish(self):
        await self.service.finish_session(ME, self.session)

    async def sweep(self):
        await self.service.retention.sweep()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_counted_is_what_is_kept(tmp_path, seed):
    rng, root = random.Random(seed), tmp_path / "server"
    limits = Limits(snapshot_every=2, max_models=2, keep_seconds=1e-9 if seed % 2 else 3600.0)

    async def main():
        async with living(root, limits) as service:
            tenant = Tenant(service, rng)
            await tenant.begin()
            acts = [
                tenant.train, tenant.train, tenant.train, tenant.be_refused, tenant.save, tenant.save,
                tenant.save_for_sampler, tenant.sample, tenant.delete, tenant.copy, tenant.expire, tenant.sweep,
            ]  # fmt: skip
            for i in range(50):
                act = tenant.finish if i == 40 else rng.choice(acts)
                await act()
                for _ in range(1000):  # a snapshot follows the answer
                    kept = on_disk(root) + in_rows(service.database)
                    if service.quotas.used(ME) == kept:
                        break
                    await asyncio.sleep(0.005)
                assert service.quotas.used(ME) == kept, act.__name__
            assert Quotas(service.database, root, limits).used(ME) == kept  # as after a restart

    asyncio.run(main())


def test_what_would_be_too_much_is_refused_with_numbers_and_a_remedy(tmp_path):
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            session = service.create_session(ME, None, None)
            model = await make_model(service, session)
            await train(service, model, 1)
            await save(service, "save_weights", model, 3, path="kept")
            used = service.quotas.used(ME)
        limits = Limits(max_disk_gib=(used + 100) / 2**30)
        async with living(root, limits) as service:
            row = await save(service, "save_weights", model, 4, state="refused", path="x" * 50)  # at the save
            assert b'"user"' in row.result and b"limits.max_disk_gib" in row.result
            assert not list(root.rglob("x" * 50 + "*")) and service.quotas.used(ME) <= used + 500
            body = request_body(model, 7, tokens=(1,) * 300, targets=(1,) * 300)
            used = service.quotas.used(ME)
            id = service.submit(ME, "forward_backward", model, 7, body)
            row = await answered(service, id, state="refused")  # by its result: it may be a part of a batch
            text = rb"you keep .* GiB .* takes .* more, and limits.max_disk_gib is .*: delete ch.*snapshot"
            assert re.search(text, row.result) and service.quotas.used(ME) == used + len(row.result)
            with pytest.raises(UserError, match="limits.max_disk_gib"):
                service.save(ME, "save_weights", model, 8, {"path": "x" * 128})
            assert not service.database.find(requests, requests.c.id == f"{model}:8")
            other = service.create_session("other", None, None)
            await train(service, await make_model(service, other, tenant="other"), 1, "other")
        async with living(root, Limits(max_disk_gib=(used + 2000) / 2**30)) as service:
            await train(service, model, 9)
            (kept,) = service.database.find(checkpoints)
            await service.checkpoints.delete(kept)
            await save(service, "save_weights", model, 11, path="kept")

    asyncio.run(main())


def test_sessions_models_and_samplers_of_a_tenant_have_a_bound(tmp_path):
    async def main():
        limits = Limits(max_tenant_sessions=2, max_tenant_models=2, max_tenant_samplers=2)
        async with living(tmp_path / "server", limits) as service:
            mine = [service.create_session(ME, None, None) for _ in range(2)]
            name = service.model_names[0]
            first = [await make_model(service, mine[0], i) for i in range(2)]
            for i in range(2):
                service.create_sampler(ME, mine[0], i, name, None)
                service.create_sampler(ME, mine[0], i, name, None)  # the same once more
            days = r"limits.keep_models_seconds \(30 days\) after"
            for act, remedy in (
                (
                    lambda: service.create_session(ME, None, None),
                    rf"finish sessions; .* limits.keep_seconds \(1 days\) after its end, .*{days}",
                ),
                (
                    lambda: service.create_model(ME, mine[0], 2, name, {}),
                    rf"go on with one of them .* a model goes {days} its last request",
                ),
                (
                    lambda: service.create_sampler(ME, mine[0], 2, name, None),
                    "finish sessions: their samplers go at once",
                ),
            ):
                with pytest.raises(UserError, match=rf"you have 2 .*limits.max_tenant_\w+ allows: {remedy}"):
                    act()
            await save(
                service, "save_weights_for_sampler", first[0], 5, state="refused", sampling_session_seq_id=7
            )
            await make_model(service, mine[0], 1)
            other = service.create_session("other", None, None)
            await make_model(service, other, tenant="other")
            await service.finish_session(ME, mine[0])
            service.create_sampler(ME, mine[1], 0, name, None)
            assert len(service.database.find(sessions)) == 3

    asyncio.run(main())


def big_save(backend):
    """As the backend's, with files beside which requests are small."""
    plain, backend.size = backend.save, 100_000

    async def save(model, directory, optimizer):
        await plain(model, directory, optimizer)
        file = directory / "adapter_config.json"
        file.write_text(file.read_text() + " " * backend.size)

    return save


class Loop:
    """As training does it: each step saves weights without a name, and samples with them, and with the first."""

    def __init__(self, service, session, model):
        self.service, self.session, self.model, self.seq = service, session, model, 10
        self.samplers = []

    async def save(self, state="done", **body):
        self.seq += 1
        body["sampling_session_seq_id"] = self.seq
        row = await save(self.service, "save_weights_for_sampler", self.model, self.seq, state=state, **body)
        self.samplers += [f"{self.session}:sample:{self.seq}"] * (state == "done")
        return row

    async def sample(self, sampler, state="done"):
        self.seq += 1
        row = await answered(self.service, self.service.sample(ME, sampler, self.seq, SAMPLE), state=state)
        return row

    def later(self, seconds):
        """As if so many seconds had gone by."""
        update = self.service.database.update
        update(samplers, samplers.c.tenant == ME, created=samplers.c.created - seconds)
        update(requests, requests.c.finished.is_not(None), finished=requests.c.finished - seconds)


async def with_room_for(num_saves, service, root):
    """A loop whose tenant has room for so many saves, and for its requests."""
    session = service.create_session(ME, None, None)
    loop = Loop(service, session, await make_model(service, session))
    await save(service, "save_weights", loop.model, 3, path="named")
    before = on_disk(root)
    await loop.save()
    size = on_disk(root) - before
    # A request and its result, which count too, are smaller than what a test adds in one step.
    service.quotas._most_bytes = service.quotas.used(ME) + (num_saves - 1) * size
    return loop, size


def test_weights_without_a_name_that_nobody_uses_make_room(tmp_path, monkeypatch):
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            monkeypatch.setattr(service.backend, "save", big_save(service.backend))
            loop, size = await with_room_for(6, service, root)
            for _ in range(30):
                await loop.save()
                await loop.sample(loop.samplers[0])  # a policy to compare with
                await loop.sample(loop.samplers[-1])
                loop.later(601)
            assert service.quotas.used(ME) <= service.quotas._most_bytes
            kept = [s for s in loop.samplers if service.sampler(ME, s).num_bytes]
            assert kept[0] == loop.samplers[0] and kept[1:] == loop.samplers[-len(kept) + 1 :] != []
            assert len(kept) >= 4
            for _ in range(1000):
                if on_disk(root) == (len(kept) + 1) * size:
                    break
                await asyncio.sleep(0.005)
            assert on_disk(root) == (len(kept) + 1) * size  # and the checkpoint with a name
            row = await loop.sample(loop.samplers[1], "refused")
            assert b"these weights were deleted; create another sampling session" in row.result
            assert [row.name for row in service.checkpoints.list(ME)] == ["named"]
        async with living(root) as service:
            assert service.quotas.used(ME) == on_disk(root) + in_rows(service.database)

    asyncio.run(main())


@pytest.mark.parametrize("cause", ["used", "follows its model", "a request waits", "not enough"])
def test_weights_without_a_name_stay_where(tmp_path, monkeypatch, cause):
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            monkeypatch.setattr(service.backend, "save", big_save(service.backend))
            loop, size = await with_room_for(3, service, root)
            kind = "inflight" if cause == "follows its model" else "snapshot"
            if cause == "follows its model":
                await service.finish_session(ME, loop.session)
            await loop.save(kind=kind)
            loop.later(599 if cause == "used" else 601)
            sampler = loop.samplers[-1]
            if cause == "a request waits":
                service.backend.delay = 3600.0
                for number, each in enumerate(loop.samplers):
                    service.sample(ME, each, 1000 + number, SAMPLE)
                await asyncio.sleep(0.1)
                service.backend.delay = 0.0
                loop.later(601)
            if cause == "not enough":
                service.backend.size *= 10
            service.quotas._most_bytes = service.quotas.used(ME) + size // 2
            row = await save(service, "save_weights", loop.model, 900, state="refused", path="more")
            assert b"limits.max_disk_gib" in row.result
            assert service.sampler(ME, sampler).num_bytes == size

    asyncio.run(main())


async def ended_model(service, finished=True):
    """A model with a snapshot, whose session is over."""
    session = service.create_session(ME, None, None)
    model = await make_model(service, session)
    await train(service, model, 1)
    if finished:
        await service.finish_session(ME, session)
    return model


def last_used(service, seconds):
    service.database.update(models, models.c.tenant == ME, seen=models.c.seen - seconds)


@pytest.mark.parametrize("cause", ["over", "in use", "used an hour ago", "a request waits"])
def test_a_model_whose_session_is_over_makes_room(tmp_path, monkeypatch, cause):
    async def main():
        async with living(tmp_path / "server", Limits(snapshot_every=1)) as service:
            monkeypatch.setattr(service.backend, "save", big_save(service.backend))
            old = await ended_model(service, finished=cause != "in use")
            last_used(service, 3600 if cause == "used an hour ago" else 25 * 3600)
            if cause == "a request waits":
                service.database.insert(
                    requests, id="x", tenant=ME, kind="forward", target=old, body=b"", state="waiting",
                    created=0.0, num_bytes=0, deaths=0,
                )  # fmt: skip
            mine = await make_model(service, service.create_session(ME, None, None))
            service.quotas._most_bytes = service.quotas.used(ME) + 50_000
            state = "done" if cause == "over" else "refused"
            await save(service, "save_weights", mine, 3, state=state, path="new")
            service.quotas._most_bytes *= 100
            if cause != "over":
                assert service.model(ME, old).snapshot_bytes > 100_000
                return
            with pytest.raises(NotFound):
                service.model(ME, old)
            await make_model(service, service.create_session(ME, None, None), 1)
        async with living(tmp_path / "server") as service:
            await service.retention.sweep()
            assert service.database.get(models, old) is None
            assert service.quotas.used(ME) == Quotas(service.database, tmp_path / "server", Limits()).used(ME)

    asyncio.run(main())


def test_models_whose_sessions_are_over_do_not_count_where_there_are_too_many(tmp_path):
    async def main():
        async with living(tmp_path / "server", Limits(max_tenant_models=3)) as service:
            first, second = [await ended_model(service) for _ in range(2)]
            last_used(service, 25 * 3600)
            service.database.update(models, models.c.id == first, seen=1.0)
            session = service.create_session(ME, None, None)
            for number in range(3):
                await make_model(service, session, number)
            for model in (first, second):
                with pytest.raises(NotFound):
                    service.model(ME, model)
            with pytest.raises(UserError, match="limits.max_tenant_models allows.* once its session is over"):
                await make_model(service, session, 3)

    asyncio.run(main())


def test_what_a_request_is_for_does_not_go_for_it(tmp_path, monkeypatch):
    """A sampler that was idle for long, and a model whose session is over: both may still be asked."""

    async def main():
        async with living(tmp_path / "server", Limits(snapshot_every=1)) as service:
            monkeypatch.setattr(service.backend, "save", big_save(service.backend))
            loop, _ = await with_room_for(10, service, tmp_path / "server")
            old = await ended_model(service)
            loop.later(601)
            last_used(service, 25 * 3600)
            service.quotas._most_bytes = service.quotas.used(ME)  # no room for a byte
            (sampler,) = loop.samplers
            with pytest.raises(UserError, match="limits.max_disk_gib"):
                service.database.update(models, models.c.id == old, snapshot_bytes=0)
                service.sample(ME, sampler, 1, SAMPLE)
            assert service.sampler(ME, sampler).num_bytes
            service.database.update(models, models.c.id == old, snapshot_bytes=100_000)
            service.database.update(samplers, samplers.c.id == sampler, num_bytes=0)
            body = request_body(old, 9)
            await answered(service, service.submit(ME, "forward_backward", old, 9, body), state="refused")
            assert service.model(ME, old).snapshot_bytes == 100_000

    asyncio.run(main())


def test_weights_without_a_name_go_before_models_and_no_more_of_either_than_is_needed(tmp_path):
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            older, newer = [await ended_model(service) for _ in range(2)]
            for model, days in ((older, 3), (newer, 2)):
                service.database.update(
                    models, models.c.id == model, seen=now() - days * 24 * 3600, snapshot=f"models/{days}/1",
                    snapshot_bytes=100,
                )  # fmt: skip
            weights = dict(session="s", tenant=ME, model_path=None, inflight_of=None, num_bytes=100)
            for number in (1, 2):
                directory = f"samplers/s/{number}"
                service.database.insert(
                    samplers, id=f"s:sample:{number}", directory=directory, created=float(number), **weights
                )

            def left():
                kept = service.database.find(samplers, samplers.c.num_bytes > 0, order=samplers.c.created)
                used = {row.id for row in service.list_models(ME, 10, 0)}
                return [row.id for row in kept], [model for model in (older, newer) if model in used]

            quotas = Quotas(service.database, root, Limits())
            quotas._most_bytes = quotas.used(ME)
            quotas.check(ME, 80)
            assert left() == (["s:sample:2"], [older, newer])
            quotas.check(ME, 250)
            assert left() == ([], [newer])
            assert quotas.used(ME) == Quotas(service.database, root, Limits()).used(ME)

    asyncio.run(main())


def test_what_takes_the_place_of_weights_needs_no_room_beside_them(tmp_path, monkeypatch):
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            monkeypatch.setattr(service.backend, "save", big_save(service.backend))
            loop, size = await with_room_for(3, service, root)
            await loop.save(kind="inflight")
            service.quotas._most_bytes = service.quotas.used(ME) + size // 2
            await loop.save(kind="inflight")
            await save(service, "save_weights", loop.model, 900, path="named", overwrite=True)
            row = await save(service, "save_weights", loop.model, 901, state="refused", path="other")
            assert b"limits.max_disk_gib" in row.result
            with pytest.raises(UserError, match="limits.max_disk_gib"):
                await service.copy_weights(ME, loop.session, 9, f"tinker://{loop.model}/weights/named", None)
            assert [row.name for row in service.checkpoints.list(ME)] == ["named"]

    asyncio.run(main())
