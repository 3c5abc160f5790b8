"""A server that is killed, or whose engine dies: clients go on, and no optim_step is lost or done twice."""

# holds: exact, the fake backend counts in float64

import asyncio
import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")

from tinker.proto.response_conv import deserialize_forward_backward_output  # noqa: E402

from rl.errors import RunError  # noqa: E402
from rl.tinker.database import Database, requests  # noqa: E402
from rl.tinker.limits import Limits  # noqa: E402
from rl.tinker.service import Service  # noqa: E402
from tests.ports import free_port  # noqa: E402
from tests.tinker import lives  # noqa: E402
from tests.tinker.databases import url_of  # noqa: E402
from tests.tinker.fakes import KEYS, NAME, FakeBackend, serving  # noqa: E402
from tests.tinker.lives import ME  # noqa: E402
from tests.tinker.test_protocol import ADAM, client, datum, request_body, value_of  # noqa: E402
from tests.tinker.test_quotas import SAMPLE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SERVER = """
import sys, time
from pathlib import Path
from tests.tinker.fakes import FakeBackend, Limits, serving
backend = FakeBackend()
backend.delay = 0.005
with serving(Path(sys.argv[1]), backend, Limits(snapshot_every=4), port=int(sys.argv[2]), database_url=sys.argv[3]):
    print("up", flush=True)
    time.sleep(600)
"""


def seeded(url, count):
    """Models with the seeds 0, 1, ..."""
    sdk = client(url)
    return [sdk.create_lora_training_client(base_model=NAME, rank=8, seed=i).result() for i in range(count)]


@pytest.mark.parametrize("lose_at", [3, 7, 12, 13, 20])
def test_where_the_engine_dies_every_model_is_what_it_was(tmp_path, lose_at):
    backend = FakeBackend()
    backend.lose_at = lose_at
    with serving(tmp_path / "server", backend, Limits(snapshot_every=3)) as (url, _):
        models = seeded(url, 2)
        for _ in range(8):
            for training in models:
                training.forward_backward([datum(), datum()], "cross_entropy")
                training.optim_step(ADAM).result()
        assert [value_of(t) for t in models] == pytest.approx([8 * 0.6, 1 + 8 * 0.6])


def test_more_models_than_the_engine_holds_take_turns(tmp_path):
    backend = FakeBackend()
    with serving(tmp_path / "server", backend, Limits(max_models=2)) as (url, _):
        models = seeded(url, 5)
        for _ in range(3):
            for training in models:
                training.forward_backward([datum()], "cross_entropy")
                training.optim_step(ADAM).result()
                assert len(backend.models) <= 2
        assert [value_of(t) for t in models] == pytest.approx([i + 0.9 for i in range(5)])


def test_models_with_a_gradient_make_room_for_others_too(tmp_path):
    backend = FakeBackend()
    with serving(tmp_path / "server", backend, Limits(max_models=2)) as (url, _):
        models = seeded(url, 4)
        for _ in range(3):
            for training in models:
                training.forward_backward([datum()], "cross_entropy").result()
            for training in models:
                training.optim_step(ADAM).result()
            assert len(backend.models) <= 2
        assert [value_of(t) for t in models] == pytest.approx([i + 0.9 for i in range(4)])


def test_what_only_computes_is_not_done_again(tmp_path):
    backend = FakeBackend()
    with serving(tmp_path / "server", backend) as (url, _):
        (training,) = seeded(url, 1)
        training.forward_backward([datum()], "cross_entropy").result()
        training.forward([datum()], "cross_entropy").result()
        backend.lose_at = len(backend.log) + 1
        training.optim_step(ADAM).result()
    again = backend.log[backend.lose_at :]
    assert [kind for kind, _ in again] == ["create", "forward_backward", "optim_step"]


def test_a_model_that_cannot_be_restored_says_so_and_leaves_no_half_of_it(tmp_path):
    """What worked the first time and fails now would leave other weights than the client knows of."""

    class Full(FakeBackend):
        is_full = False

        async def optim_step(self, model, params):
            if self.is_full:
                raise RunError("out of memory")
            return await super().optim_step(model, params)

    backend = Full()
    with serving(tmp_path / "server", backend) as (url, _):
        (training,) = seeded(url, 1)
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(ADAM).result()
        backend.lose_at, backend.is_full = len(backend.log) + 1, True
        with pytest.raises(tinker.RequestFailedError, match="cannot be restored: its optim_step .* worked"):
            training.forward([datum()], "cross_entropy").result()
        assert not backend.models
        backend.is_full = False
        assert value_of(training) == pytest.approx(0.3)


@pytest.mark.slow
def test_a_server_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path):
    """Three clients train while the server is killed at random moments; they only see the SDK's own retries."""
    port, root = free_port(), tmp_path / "server"
    command = [sys.executable, "-c", SERVER, str(root), str(port), url_of(root)]

    def start():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "up\n"
        return process

    server, rng, found = start(), random.Random(0), {}

    def train(i):
        training = client(f"http://127.0.0.1:{port}").create_lora_training_client(
            base_model=NAME, rank=8, seed=i
        ).result()  # fmt: skip
        for _ in range(30):
            training.forward_backward([datum()], "cross_entropy")
            training.optim_step(ADAM).result()
        found[i] = value_of(training)

    clients = [threading.Thread(target=train, args=(i,), daemon=True) for i in range(3)]
    for thread in clients:
        thread.start()
    num_kills = 0
    while any(thread.is_alive() for thread in clients):
        time.sleep(rng.uniform(0.2, 1.0))
        if num_kills < 10:
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
            server, num_kills = start(), num_kills + 1
    server.kill()
    server.wait()
    assert num_kills >= 5
    assert [found[i] for i in range(3)] == pytest.approx([i + 30 * 0.3 for i in range(3)])


def test_a_key_of_the_first_tenant_still_finds_its_model_after_a_restart(tmp_path):
    with serving(tmp_path / "server") as (url, _):
        training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=4).result()
        path = training.save_state("kept").result().path
    with serving(tmp_path / "server") as (url, _):
        rest = tinker.RestClient(base_url=url, api_key=KEYS[0])
        assert [run.training_run_id for run in rest.list_training_runs().result().training_runs] == [
            training.model_id
        ]
        assert value_of(client(url).create_training_client_from_state(path).result()) == 4


class Dead(BaseException):
    """The process was killed."""


class MortalDatabase(Database):
    """Dies before its k-th change."""

    def __init__(self, url, k):
        self.left = math.inf
        super().__init__(url)
        self.left = k

    def _run(self, statement, values=None, changes=False):
        self._live(changes)
        return super()._run(statement, values, changes)

    def change(self, *statements, durable=False):
        self._live(1)
        super().change(*statements, durable=durable)

    def _live(self, changes):
        self.left -= changes
        if self.left < 0:
            raise Dead


class MortalBackend(FakeBackend):
    """Dies before its k-th call."""

    def __init__(self, k):
        super().__init__()
        self.k = k

    async def _call(self, *what):
        if len(self.log) >= self.k:
            raise Dead
        await super()._call(*what)


async def train_once(root, database, backend, acknowledged, steps):
    """One life of a server, whose client sends again what was not answered. Returns the model's value at the end."""
    limits = Limits(snapshot_every=2)
    service = Service(database, backend, root, (NAME,), (0,), limits)
    working = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    tenant = "me"

    async def answered(id):
        waiting = asyncio.create_task(service.queue.wait(id, tenant, 5))
        await asyncio.wait({waiting, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            waiting.cancel()
            raise Dead
        row = waiting.result()
        assert row.state == "done", row.result
        return row

    try:
        if "session" not in acknowledged:
            acknowledged["session"] = service.create_session(tenant, None, None)
        session, model = acknowledged["session"], f"{acknowledged['session']}:train:0"
        lora = {"lora_config": {"rank": 4, "seed": 0}}
        await answered(service.create_model(tenant, session, 0, NAME, lora))
        for step in range(acknowledged.get("steps", 0), steps):
            for part in (1, 2):
                body = request_body(model, 10 * step + part)
                await answered(service.submit(tenant, "forward_backward", model, 10 * step + part, body))
            await answered(service.optim_step(tenant, model, 10 * step + 3, lives.ADAM))
            acknowledged["steps"] = step + 1
        row = await answered(service.submit(tenant, "forward_backward", model, 999, request_body(model, 999)))
        output = deserialize_forward_backward_output(row.result)
        return -output.loss_fn_outputs[0]["logprobs"].data[0]
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseException):
            await working
        database.close()


@pytest.mark.parametrize("what", ["database", "backend"])
@pytest.mark.parametrize(
    ("steps", "least"), [(4, 10), pytest.param(7, 20, marks=pytest.mark.slow)], ids=["4 steps", "7 steps"]
)
def test_wherever_a_server_dies_nothing_is_lost_or_done_twice(tmp_path, what, steps, least):
    """Before each change of the database, and before each call of the backend; and once more in its second life.

    There is a snapshot after every second step.
    """
    deaths = 0
    for k in range(0, 400, 2):
        root = tmp_path / f"{what}-{k}"
        root.mkdir()
        url, acknowledged = url_of(root), {}
        for life in (k, k // 2, math.inf):
            database = MortalDatabase(url, life if what == "database" else math.inf)
            backend = MortalBackend(life if what == "backend" else math.inf)
            try:
                value = asyncio.run(train_once(root, database, backend, acknowledged, steps))
                break
            except BaseExceptionGroup:
                deaths += 1
            except Dead:
                deaths += 1
        assert value == pytest.approx(steps * 0.1 * 6), (what, k)
        if life == k:  # it lived through it all
            break
    else:
        raise AssertionError("it never lived")
    assert deaths > least


def test_a_servers_directory_may_be_moved(tmp_path, database_kind):
    with serving(tmp_path / "here", limits=Limits(snapshot_every=1)) as (url, _):
        (training,) = seeded(url, 1)
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(ADAM).result()
        path = training.save_state("kept").result().path
        sampled = training.save_weights_for_sampler("sampled").result().path
        value = value_of(training)
    (tmp_path / "here").rename(tmp_path / "there")
    database_url = url_of(tmp_path / ("there" if database_kind == "sqlite" else "here"))
    with serving(tmp_path / "there", database_url=database_url) as (url, _):
        sdk = client(url)
        assert value_of(sdk.create_training_client_from_state_with_optimizer(path)) == pytest.approx(value)
        prompt = tinker.ModelInput.from_ints([1, 2, 3])
        params = tinker.SamplingParams(max_tokens=2)
        sampling = sdk.create_sampling_client(model_path=sampled)
        assert len(sampling.sample(prompt, 1, params).result().sequences) == 1
        sdk.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    assert not list((tmp_path / "there").rglob("kept.*"))


def test_a_server_that_ends_in_good_order_fails_no_sample(tmp_path):
    """The generators end while requests run, and others wait for their turns."""

    class Ends(FakeBackend):
        async def sample(self, *args, **kwargs):
            await self.end.wait()
            raise RunError("the generators have ended")

    async def main():
        backend = Ends()
        backend.end = asyncio.Event()
        database = Database(url_of(tmp_path))
        service = Service(database, backend, tmp_path, (NAME,), (0,), capacity=1, shared_samples=1)
        working = asyncio.create_task(service.run())
        await asyncio.sleep(0)
        sampler = service.create_sampler(ME, service.create_session(ME, None, None), 0, NAME, None)
        ids = [service.sample(ME, sampler, i, SAMPLE) for i in (1, 2)]
        await asyncio.sleep(0.01)
        working.cancel()
        await asyncio.wait({working})
        backend.end.set()
        await asyncio.sleep(0.01)
        rows = [database.get(requests, id, "id") for id in ids]
        assert [(row.state, row.deaths) for row in rows] == [("waiting", 0)] * 2
        database.close()

    asyncio.run(main())
