"""What replaces something is on the disk before that goes: the machine may lose power at any moment."""

import asyncio
import os
import shutil

import pytest
from sqlalchemy import event

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.tinker.database import checkpoints, models
from rl.tinker.limits import Limits
from tests.tinker.lives import ME, living, make_model, save, train


class Log(list):
    """What happens to the disk and to the database, in its order."""

    def __init__(self, database, monkeypatch):
        fsync, rmtree = os.fsync, shutil.rmtree

        def sync(file):
            self.append(f"sync {os.readlink(f'/proc/self/fd/{file}')}")
            fsync(file)

        def remove(path, **settings):
            self.append(f"remove {path}")
            rmtree(path, **settings)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(shutil, "rmtree", remove)
        event.listen(
            database._connection._engine, "before_cursor_execute", lambda *args: self.append(args[2])
        )

    def first(self, start, after=0):
        """Where something that begins so is, no earlier than `after`."""
        return next(i for i, entry in enumerate(self) if i >= after and entry.startswith(start))


@pytest.mark.parametrize("kind", ["snapshot", "checkpoint"])
def test_files_then_rows_then_what_they_replace(tmp_path, monkeypatch, kind, database_kind):
    root = tmp_path / "server"

    async def main():
        async with living(root, Limits(snapshot_every=1)) as service:
            model = await make_model(service, service.create_session(ME, None, None))

            async def write(seq):
                await train(service, model, seq)
                await save(service, "save_weights", model, seq + 2, path="x", overwrite=True)
                if kind == "snapshot":
                    return root / service.database.get(models, model).snapshot
                return root / service.database.get(checkpoints, f"tinker://{model}/weights/x").directory

            old = await write(1)
            log = Log(service.database, monkeypatch)
            new = await write(11)
            places = [log.first(f"sync {new}/adapter_config.json"), log.first(f"sync {new.parent}")]
            if kind == "snapshot":
                if database_kind == "sqlite":
                    places.append(log.first("PRAGMA synchronous=FULL"))
                places.append(log.first("UPDATE models SET snapshot"))
                places.append(log.first("UPDATE requests SET body", places[-1]))
                places.append(log.first("COMMIT", places[-1]))
            else:
                places.append(log.first("INSERT INTO checkpoints"))
                places.append(log.first("COMMIT", places[-1]))
            places.append(log.first(f"remove {old}"))
            assert places == sorted(places), log

    asyncio.run(main())
