"""A checkpoint that is saved, overwritten or deleted while a request to load it waits."""

# holds: exact

import asyncio
import json
import shutil

import pytest

from rl.tinker.database import checkpoints
from rl.tinker.limits import Limits
from tests.tinker.fakes import FakeBackend
from tests.tinker.lives import ADAM, ME, answered, living, make_model, save, train, value_of
from tests.tinker.test_protocol import request_body

OTHER = "other"


class Full(FakeBackend):
    """Takes no snapshot."""

    async def save(self, model, directory, optimizer):
        if directory.parent.parent.name == "models":
            raise OSError("no space left on device")
        await super().save(model, directory, optimizer)


def test_a_load_takes_what_is_saved_under_the_name_when_its_turn_comes(tmp_path):
    """Clients send a save and a load of it without waiting between them."""

    async def main():
        async with living(tmp_path / "server") as service:
            model = await make_model(service, service.create_session(ME, None, None))
            path = f"tinker://{model}/weights/a"
            await save(service, "save_weights", model, 1, path="a")
            await train(service, model, 2)
            saving = service.save(ME, "save_weights", model, 4, {"path": "a", "overwrite": True})
            loading = service.load_weights(ME, model, 5, path, True)
            await answered(service, saving)
            await answered(service, loading)
            assert await value_of(service, model, 6) == pytest.approx(0.3)

    asyncio.run(main())


def test_a_load_that_is_done_once_more_is_refused_where_others_weights_have_its_name(tmp_path):
    """After a restart, where no snapshot could be written behind it: they would be trained twice."""
    root = tmp_path / "server"

    async def main():
        async with living(root, backend=Full()) as service:
            model = await make_model(service, service.create_session(ME, None, None))
            await save(service, "save_weights", model, 1, path="a")
            await answered(service, service.load_weights(ME, model, 2, f"tinker://{model}/weights/a", True))
            await train(service, model, 3)
            await save(service, "save_weights", model, 5, path="a", overwrite=True)
        async with living(root) as service:
            request = service.submit(ME, "forward", model, 6, request_body(model, 6))
            failed = await answered(service, request, state="failed")
            assert "overwritten or deleted before it was loaded" in failed.result.decode()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["load", "create"])
def test_a_model_needs_no_checkpoint_once_a_snapshot_can_be_written(kind, tmp_path):
    """It could not at once: the disk was full as it was loaded. Then the checkpoint goes, as by its ttl."""
    root = tmp_path / "server"

    async def main():
        async with living(root, backend=Full()) as service:
            session = service.create_session(ME, None, None)
            source = await make_model(service, session)
            await train(service, source, 1)
            await save(service, "save_weights", source, 3, path="a")
            path, loaded = f"tinker://{source}/weights/a", f"{session}:train:1"
            if kind == "load":
                await make_model(service, session, 1)
                await answered(service, service.load_weights(ME, loaded, 2, path, True))
            else:
                await answered(service, service.create_model_from(ME, session, 1, path, True, {"path": path}))
        async with living(root) as service:
            await train(service, loaded, 3)
            await save(service, "save_weights", loaded, 5, path="b")  # which its turn is after the snapshot
            await service.checkpoints.delete(service.checkpoints.own(ME, source, "weights", "a"))
        async with living(root) as service:
            assert await value_of(service, loaded, 6) == pytest.approx(0.6)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["load", "create"])
def test_one_that_is_gone_when_its_turn_comes_is_the_clients_failure(kind, tmp_path):
    root = tmp_path / "server"

    async def main():
        async with living(root) as service:
            session = service.create_session(ME, None, None)
            model = await make_model(service, session)
            path = f"tinker://{model}/weights/a"
            await save(service, "save_weights", model, 1, path="a")
            row = service.database.get(checkpoints, path)
            if kind == "load":
                request = service.load_weights(ME, model, 2, path, True)
            else:
                request = service.create_model_from(ME, session, 1, path, True, {"path": path})
            service.database.delete(checkpoints, checkpoints.c.path == path)
            shutil.rmtree(root / row.directory)
            failed = await answered(service, request, state="refused")
            text = failed.result.decode()
            expected = (
                "overwritten or deleted before it was loaded" if kind == "load" else "create another model"
            )
            assert expected in text
            assert '"user"' in text and str(root) not in text

    asyncio.run(main())


def test_a_published_checkpoint_that_is_private_again_is_loaded_by_no_other_tenant(tmp_path):
    """As one that replaces it is, until it is published too."""

    async def main():
        async with living(tmp_path / "server") as service:
            models = {}
            for tenant in (ME, OTHER):
                session = service.create_session(tenant, None, None)
                models[tenant] = await make_model(service, session, tenant=tenant)
            mine, theirs = models[ME], models[OTHER]
            await save(service, "save_weights", theirs, 1, OTHER, path="a")
            path = f"tinker://{theirs}/weights/a"
            row = service.database.get(checkpoints, path)
            service.checkpoints.change(row, public=True)
            await answered(service, service.load_weights(ME, mine, 1, path, True))
            request = service.load_weights(ME, mine, 2, path, True)
            service.checkpoints.change(row, public=False)
            await answered(service, request, state="refused")

    asyncio.run(main())


def test_a_step_right_after_a_load_changes_nothing(tmp_path):
    async def main():
        async with living(tmp_path / "server") as service:
            model = await make_model(service, service.create_session(ME, None, None))
            await save(service, "save_weights", model, 1, path="a")
            await answered(service, service.load_weights(ME, model, 2, f"tinker://{model}/weights/a", True))
            row = await answered(service, service.optim_step(ME, model, 3, ADAM))
            assert json.loads(row.result) == {"metrics": {"grad_norm:mean": 0.0}}
            assert service.backend.models[model]["steps"] == 0

    asyncio.run(main())


def test_a_models_optimizer_goes_on_after_a_restart(tmp_path):
    class Exact(FakeBackend):
        """Saves the optimizer's steps where it is told to."""

        async def save(self, model, directory, optimizer):
            await super().save(model, directory, optimizer)
            if not optimizer:
                state = self.models[model] | {"steps": 0}
                (directory / "adapter_config.json").write_text(json.dumps(state))

    root = tmp_path / "server"

    async def main():
        async with living(root, Limits(snapshot_every=1), Exact()) as service:
            model = await make_model(service, service.create_session(ME, None, None))
            await train(service, model, 1)
            await train(service, model, 3)
            await save(service, "save_weights", model, 5, path="a")  # its turn is after the snapshot
        async with living(root, backend=Exact()) as service:
            await train(service, model, 6)
            assert service.backend.models[model]["steps"] == 3
            assert [verb for verb, _ in service.backend.log] == ["load", "forward_backward", "optim_step"]

    asyncio.run(main())
