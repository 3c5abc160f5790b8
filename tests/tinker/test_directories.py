"""Whatever is saved, overwritten, deleted, copied, and wherever the server is killed: a directory of weights is
written once, samplers sample with what they were created on or are told that it was deleted, and nothing is left."""

# holds: exact, the fake backend counts in float64

import asyncio
import contextlib
import json
import math
import random
import shutil

import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.errors import RunError
from rl.tinker.backend import NotFound, UserError
from rl.tinker.database import Database, checkpoints, models, samplers
from rl.tinker.limits import Limits
from rl.tinker.service import Service
from rl.types import SamplingParams
from tests.tinker import lives
from tests.tinker.fakes import NAME, FakeBackend
from tests.tinker.test_protocol import request_body
from tests.tinker.test_restart import Dead, MortalDatabase

ME = "me"
ADAM = lives.ADAM | {"learning_rate": 0.5}
NAMES = ("x", "x.partial", "y")  # a name may look like anything that the server calls its own
KINDS = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights"}


class SlotBackend(FakeBackend):
    """Samples as a generator does: with what it read in a directory once, whatever is there later."""

    def __init__(self, written):
        super().__init__()
        self.slots, self.written, self.saves_left = {}, written, math.inf

    async def save(self, model, directory, optimizer):
        assert directory not in self.written, f"{directory} is written again"
        self.written.add(directory)
        self.saves_left -= 1
        if self.saves_left < 0:  # killed in the middle of it
            directory.mkdir(parents=True)
            raise Dead
        await super().save(model, directory, optimizer)

    async def sample(self, adapter, prompt, n, params):
        if adapter not in self.slots:
            state = json.loads((adapter / "adapter_config.json").read_text())
            self.slots[adapter] = state["value"]
        return self.slots[adapter]


class World:
    """A server that is killed and started again, and what its client knows."""

    def __init__(self, root, rng):
        self.root, self.rng, self.written = root, rng, set()
        self.checkpoints = {}  # path -> (the value it was saved with, a number that no other save has)
        self.sampled = {}  # sampler -> (value, number, path)
        self.numbers, self.seq = iter(range(10**6)), 0
        self.working = None
        self.num_kills = 0

    async def start(self):
        self.database = MortalDatabase(f"sqlite:///{self.root}/server.db", math.inf)
        self.backend = SlotBackend(self.written)
        self.service = Service(
            self.database, self.backend, self.root, (NAME,), (0,), Limits(snapshot_every=2)
        )
        self.working = asyncio.create_task(self.service.run())
        await asyncio.sleep(0)
        self.check_disk()

    async def stop(self):
        self.working.cancel()
        with contextlib.suppress(asyncio.CancelledError, Dead, BaseExceptionGroup):
            await self.working
        self.database._connection.close()

    async def begin(self):
        await self.start()
        self.session = self.service.create_session(ME, None, None)
        self.models = [f"{self.session}:train:{i}" for i in range(2)]
        for i in range(2):
            lora = {"lora_config": {"rank": 4, "seed": i}}
            await self.answered(self.service.create_model(ME, self.session, i, NAME, lora))

    async def answered(self, id):
        waiting = asyncio.create_task(self.service.queue.wait(id, ME, 5))
        await asyncio.wait({waiting, self.working}, return_when=asyncio.FIRST_COMPLETED)
        if self.working.done():
            waiting.cancel()
            raise Dead
        return waiting.result()

    async def lives(self, act):
        """act, until it is done by a server that lives that long."""
        if self.rng.random() < 0.3:
            self.database.left = self.rng.randrange(6)
            if self.rng.random() < 0.3:
                self.backend.saves_left = 0
        while True:
            try:
                result = await act()
                self.database.left = self.backend.saves_left = math.inf
                return result
            except Dead:
                self.num_kills += 1
                await self.stop()
                await self.start()

    def check_disk(self):
        """A directory is there if and only if a row names it."""
        named = {row.directory for table in (checkpoints, samplers) for row in self.database.find(table)}
        named |= {row.snapshot for row in self.database.find(models)} - {None}
        named.discard(None)
        there = {str(file.parent.relative_to(self.root)) for file in self.root.rglob("adapter_config.json")}
        partly = {str(p.relative_to(self.root)) for p in self.root.glob("checkpoints/*/*/*")}
        deleted = {sampled.directory for sampled in self.database.find(samplers)} - there
        assert there | partly == named - deleted

    async def settle(self):
        """A snapshot that follows an answer may still be under way, and a directory may go as it is listed."""
        for _ in range(200):
            with contextlib.suppress(AssertionError, FileNotFoundError):
                return self.check_disk()
            await asyncio.sleep(0.01)
        self.check_disk()

    # ---- what a client does

    async def train(self):
        model, self.seq = self.rng.choice(self.models), self.seq + 2
        seq = self.seq

        async def act():
            body = request_body(model, seq - 1)
            await self.answered(self.service.submit(ME, "forward_backward", model, seq - 1, body))
            row = await self.answered(self.service.optim_step(ME, model, seq, ADAM))
            assert row.state == "done", row.result

        await self.lives(act)

    async def save(self):
        model, name, self.seq = self.rng.choice(self.models), self.rng.choice(NAMES), self.seq + 1
        kind, overwrite, seq = self.rng.choice(list(KINDS)), self.rng.random() < 0.7, self.seq

        async def act():
            body = {"path": name, "overwrite": overwrite}
            return await self.answered(self.service.save(ME, kind, model, seq, body))

        row, path = await self.lives(act), f"tinker://{model}/{KINDS[kind]}/{name}"
        assert (row.state == "done") == (overwrite or path not in self.checkpoints), row.result
        if row.state == "done":
            directory = self.root / self.database.get(checkpoints, path).directory
            value = json.loads((directory / "adapter_config.json").read_text())["value"]
            self.checkpoints[path] = value, next(self.numbers)

    async def delete(self):
        if not self.checkpoints:
            return
        path = self.rng.choice(list(self.checkpoints))

        async def act():
            with contextlib.suppress(NotFound):  # it was deleted, and the server killed right after
                await self.service.checkpoints.delete(self.service.checkpoints.readable(ME, path))

        await self.lives(act)
        del self.checkpoints[path]

    async def copy(self):
        if not self.checkpoints:
            return
        path = self.rng.choice(list(self.checkpoints))
        copy = await self.lives(lambda: self.service.copy_weights(ME, self.session, 7, path, None))
        if copy not in self.checkpoints:
            self.checkpoints[copy] = self.checkpoints[path][0], next(self.numbers)

    async def create_sampler(self):
        if not self.checkpoints:
            return
        path, number = self.rng.choice(list(self.checkpoints)), next(self.numbers)

        async def act():
            return self.service.create_sampler(ME, self.session, number, None, path)

        self.sampled[await self.lives(act)] = (*self.checkpoints[path], path)

    async def sample(self):
        for id, (value, number, path) in self.sampled.items():
            directory = self.database.get(samplers, id).directory
            is_there = path in self.checkpoints and self.checkpoints[path][1] == number
            try:
                adapter = self.service.sampling._adapter(directory)
                assert await self.backend.sample(adapter, [1], 1, SamplingParams(1)) == value
                assert is_there, (id, path)
            except UserError as error:
                assert "deleted" in str(error) and not is_there


@pytest.mark.parametrize("seed", range(12))
def test_samplers_keep_what_they_were_created_on(tmp_path, seed):
    rng = random.Random(seed)
    world = World(tmp_path, rng)

    async def main():
        await world.begin()
        acts = [world.train, world.save, world.save, world.delete, world.copy, world.create_sampler]
        for _ in range(40):
            await rng.choice(acts)()
            await world.sample()
            await world.settle()
        await world.stop()

    asyncio.run(main())
    assert world.num_kills and len(world.written) > 5


def test_another_directorys_database_removes_nothing(tmp_path):
    """What is removed as a remnant belongs to a session that the database knows."""
    kept = tmp_path / "checkpoints" / "another-train-0" / "weights" / "x"
    kept.mkdir(parents=True)
    world = World(tmp_path, random.Random(0))
    world.check_disk = lambda: None

    async def main():
        await world.begin()
        await world.stop()

    asyncio.run(main())
    assert kept.is_dir()


def test_what_was_left_of_a_copy_to_a_model_that_never_came_is_removed(tmp_path):
    world = World(tmp_path, random.Random(0))

    async def main():
        await world.begin()
        left = tmp_path / "checkpoints" / f"{world.session}-train-9" / "weights" / "x.0123"
        left.mkdir(parents=True)
        await world.stop()
        await world.start()
        await world.stop()
        assert not left.exists()

    asyncio.run(main())


def test_a_copy_for_which_there_is_no_room_is_not_told_as_a_checkpoint_that_is_gone(tmp_path, monkeypatch):
    def copytree(source, target):
        raise shutil.Error([(str(source), str(target), "[Errno 28] No space left on device")])

    async def main():
        async with lives.living(tmp_path / "server") as service:
            session = service.create_session(ME, None, None)
            model = await lives.make_model(service, session)
            await lives.save(service, "save_weights", model, 1, path="x")
            (row,) = service.checkpoints.list(ME)
            monkeypatch.setattr(shutil, "copytree", copytree)
            with pytest.raises(RunError, match="could not be copied .*No space left on device"):
                await service.copy_weights(ME, session, 9, row.path, None)
            shutil.rmtree(tmp_path / "server" / row.directory)
            with pytest.raises(NotFound, match="there is no checkpoint"):
                await service.copy_weights(ME, session, 9, row.path, None)

    asyncio.run(main())


def test_weights_that_are_deleted_while_a_sample_waits_for_them_are_named(tmp_path):
    backend = FakeBackend()
    backend.delay = 0.01
    database = Database(f"sqlite:///{tmp_path}/server.db")
    service = Service(database, backend, tmp_path, (NAME,), (0,))
    (tmp_path / "one").mkdir()
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 1, "stop": None, "seed": 0}

    async def main():
        body = {"prompt": prompt, "num_samples": 1, "sampling_params": params}
        sampling = asyncio.create_task(service.sampling.sample(ME, "one", body))
        await asyncio.sleep(0)
        (tmp_path / "one").rmdir()
        with pytest.raises(UserError, match="deleted"):
            await sampling

    asyncio.run(main())
    database.close()
