"""Checkpoints: what models were saved as, under a name or for one sampler: directories that PEFT opens."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from rl.tinker.backend import Backend, NotFound, UserError
from rl.tinker.database import Database, checkpoints, now, samplers
from rl.tinker.encryption import encrypt
from rl.tinker.paths import EXTERNAL, CheckpointPath

_SAVED = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": EXTERNAL,
}
"""A request's kind -> that of its checkpoint."""


class Checkpoints:
    """Owns the directories of checkpoints and samplers. A directory is complete or not there."""

    def __init__(self, database: Database, backend: Backend, root: Path):
        self._database = database
        self._backend = backend
        self._root = root
        self._copying = asyncio.Lock()

    @property
    def root(self) -> Path:
        """The server's directory."""
        return self._root

    async def save(self, request: Row, model: Row) -> dict[str, Any]:
        """A request of `_SAVED`, when its turn has come."""
        body = json.loads(request.body)
        kind = _SAVED[request.kind]
        name = body.get("path")
        if kind == "sampler_weights" and body.get("sampling_session_seq_id") is not None:
            return await self._save_for_session(request, model, body)
        path = CheckpointPath.make(model.id, kind, name or f"{request.number:08d}")
        there = self._get(path)
        if there is not None and there.request != request.id:
            if not body.get("overwrite"):
                raise UserError(f"{path} is there already; choose another name, or set overwrite")
        elif there is not None:  # written before a restart
            return {"path": str(path), "type": request.kind}
        recipients = body.get("age_encryption_recipients") or ()
        await self._write(model, path.directory(self._root), kind == "weights", recipients)
        self._database.delete(checkpoints, checkpoints.c.path == str(path))
        self._insert(path, model.tenant, request.id, model.lora, body)
        return {"path": str(path), "type": request.kind}

    def _insert(
        self, path: CheckpointPath, tenant: str, request: str, lora: Any, body: Mapping[str, Any]
    ) -> None:
        directory, ttl = path.directory(self._root), body.get("ttl_seconds")
        self._database.insert(
            checkpoints, path=str(path), model=path.model_id, tenant=tenant, kind=path.kind, name=path.name,
            request=request, directory=self._relative(directory), lora=lora, created=now(),
            num_bytes=_size(directory), public=False, expires=now() + ttl if ttl else None,
            user_metadata=body.get("user_metadata"),
        )  # fmt: skip

    async def copy(self, source: Row, tenant: str, model: str, ttl_seconds: int | None) -> CheckpointPath:
        """A checkpoint of this tenant's own, under a model's id. The same once more is the same copy."""
        made_of = f"{source.path} of {source.created!r}"
        suffix = hashlib.blake2b(made_of.encode(), digest_size=6).hexdigest()
        path = CheckpointPath.make(model, source.kind, f"{source.name[:100]}-copy-{suffix}")
        directory = path.directory(self._root)
        async with self._copying:
            if self._get(path) is not None:
                return path
            self._database.delete(checkpoints, checkpoints.c.path == str(path))
            try:
                async with _complete(directory) as partial:
                    await asyncio.to_thread(shutil.copytree, self._root / source.directory, partial)
            except (FileNotFoundError, shutil.Error) as error:  # it was deleted meanwhile
                raise NotFound(f"there is no checkpoint {source.path}") from error
            copied = {"ttl_seconds": ttl_seconds, "user_metadata": source.user_metadata}
            self._insert(path, tenant, f"copy of {source.path}", source.lora, copied)
        return path

    async def _save_for_session(self, request: Row, model: Row, body: Mapping[str, Any]) -> dict[str, Any]:
        """Weights without a name, for one sampler."""
        id = f"{model.session}:sample:{body['sampling_session_seq_id']}"
        inflight = body.get("kind") == "inflight"
        if self._database.get(samplers, id) is None:
            directory = self._of_samplers(model.session) / str(request.number)
            await self._write(model, directory, optimizer=False, recipients=())
            if inflight:
                newest = samplers.c.inflight_of == model.id
                self._database.update(samplers, newest, directory=self._relative(directory))
            self._database.insert(
                samplers, id=id, session=model.session, tenant=model.tenant, model_path=None,
                directory=self._relative(directory), inflight_of=model.id if inflight else None,
                created=now(),
            )  # fmt: skip
        return {"path": None, "sampling_session_id": id, "type": "save_weights_for_sampler"}

    async def _write(self, model: Row, directory: Path, optimizer: bool, recipients: Sequence[str]) -> None:
        """recipients: of age, where the files are for them alone."""
        async with _complete(directory) as partial:
            await self._backend.save(model.id, partial, optimizer)
            if recipients:
                await asyncio.to_thread(encrypt, partial, recipients)

    def readable(self, tenant: str, path: str) -> Row:
        """A checkpoint of this tenant's, or one that is public."""
        row = self._get(CheckpointPath.parse(path))
        if row is None or (row.tenant != tenant and not row.public):
            raise NotFound(f"there is no checkpoint {path}")
        return row

    def loadable(self, tenant: str, path: str) -> Row:
        """One of those that models and samplers read."""
        row = self.readable(tenant, path)
        if row.kind == EXTERNAL:
            raise UserError(
                f"{path} are for download alone; save_weights_for_sampler and save_state make what is loaded"
            )
        return row

    def external(self, model: str, name: str) -> Row:
        """Of any tenant: for whoever has a signed URL."""
        row = self._get(CheckpointPath.make(model, EXTERNAL, name))
        if row is None:
            raise NotFound(f"there is no checkpoint {EXTERNAL}/{name} of {model}")
        return row

    def own(self, tenant: str, model: str, kind: str, name: str) -> Row:
        """This tenant's own."""
        row = self._get(CheckpointPath.make(model, kind, name))
        if row is None or row.tenant != tenant:
            raise NotFound(f"there is no checkpoint {kind}/{name} of {model}")
        return row

    def _get(self, path: CheckpointPath) -> Row | None:
        """None also for one past its time, which `sweep` will delete."""
        row = self._database.get(checkpoints, str(path))
        return None if row is None or (row.expires is not None and row.expires < now()) else row

    def list(self, tenant: str, model: str | None = None) -> Sequence[Row]:
        live = checkpoints.c.expires.is_(None) | (checkpoints.c.expires >= now())
        where = [checkpoints.c.tenant == tenant, live, *([checkpoints.c.model == model] if model else [])]
        return self._database.find(checkpoints, *where, order=checkpoints.c.created.desc())

    def change(self, checkpoint: Row, **values: Any) -> None:
        self._database.update(checkpoints, checkpoints.c.path == checkpoint.path, **values)

    def delete(self, checkpoint: Row) -> None:
        self._database.delete(checkpoints, checkpoints.c.path == checkpoint.path)
        shutil.rmtree(self._root / checkpoint.directory, ignore_errors=True)

    def drop_samplers(self, session: str) -> None:
        """Of a session that is over, with the weights that were written for them alone."""
        self._database.delete(samplers, samplers.c.session == session)
        shutil.rmtree(self._of_samplers(session), ignore_errors=True)

    def _relative(self, directory: Path) -> str:
        """As rows name it: the server's directory may be moved."""
        return str(directory.relative_to(self._root))

    def _of_samplers(self, session: str) -> Path:
        return self._root / "samplers" / session

    def sweep(self) -> None:
        """Those past their time go."""
        for row in self._database.find(checkpoints, checkpoints.c.expires < now()):
            self.delete(row)


@asynccontextmanager
async def _complete(directory: Path) -> AsyncIterator[Path]:
    """Where to write it: it appears when it is complete, in the place of one that is overwritten."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
