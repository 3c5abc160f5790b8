"""What a tenant keeps is counted exactly, whatever is done in whatever order, and no more than a bound of it."""

# holds: exact, counts of bytes

import asyncio
import random

import pytest
from sqlalchemy import func, select

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.tinker.backend import UserError
from rl.tinker.database import checkpoints, requests, sessions
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
            with pytest.raises(
                UserError,
                match=r"you keep .* GiB .* takes .* more, and limits.max_disk_gib is .*: delete ch.*snapshot",
            ):
                service.submit(ME, "forward_backward", model, 7, body)  # at the submit
            assert not service.database.find(requests, requests.c.id == f"{model}:7")
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
