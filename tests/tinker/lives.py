"""A service without HTTP, for one life of a server; and a client that knows its methods."""

import asyncio
import contextlib

from rl.tinker.database import Database
from rl.tinker.limits import Limits
from rl.tinker.service import Service
from tests.tinker.databases import url_of
from tests.tinker.fakes import NAME, FakeBackend
from tests.tinker.test_protocol import request_body

ME = "me"
ADAM = {
    "learning_rate": 0.1,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
    "beta1": 0.9,
    "beta2": 0.9,
}
LORA = {"lora_config": {"rank": 4, "seed": 0}}


@contextlib.asynccontextmanager
async def living(root, limits=Limits(), backend=None, database=None):
    """The service, from a start to a death."""
    root.mkdir(exist_ok=True)
    database = database or Database(url_of(root))
    service = Service(database, backend or FakeBackend(), root, (NAME,), (0,), limits)
    service.database = database
    working = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    try:
        yield service
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        database.close()


async def answered(service, id, tenant=ME, state="done"):
    """The request's row when it has ended."""
    row = await service.queue.wait(id, tenant, 30)
    assert row is not None and row.state == state, row and row.result
    return row


async def make_model(service, session, number=0, tenant=ME):
    await answered(service, service.create_model(tenant, session, number, NAME, LORA), tenant)
    return f"{session}:train:{number}"


async def train(service, model, seq_id, tenant=ME):
    """A forward_backward and an optim_step, which add 0.3 to the fake's model."""
    body = request_body(model, seq_id)
    await answered(service, service.submit(tenant, "forward_backward", model, seq_id, body), tenant)
    await answered(service, service.optim_step(tenant, model, seq_id + 1, ADAM), tenant)


async def save(service, verb, model, seq_id, tenant=ME, state="done", **body):
    row = await answered(service, service.save(tenant, verb, model, seq_id, body), tenant, state)
    return row


async def value_of(service, model, seq_id, tenant=ME):
    """What the fake's model has learned: it is as high as a checkpoint says."""
    await save(service, "save_weights", model, seq_id, tenant, path=f"value-{seq_id}")
    return service.backend.models[model]["value"]
