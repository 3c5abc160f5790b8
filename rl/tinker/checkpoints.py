"""Checkpoints: what models were saved as, under a name or for one sampler: directories that PEFT opens."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.engine import Row

from rl.paths import sync, sync_tree
from rl.tinker.backend import Backend, NotFound, UserError
from rl.tinker.database import Database, checkpoints, now, samplers, sessions
from rl.tinker.paths import CheckpointPath
from rl.tinker.quotas import Quotas, size_of

MOST_LISTED = 1000
_PIECE = 100


class Checkpoints:
    """Owns the directories of checkpoints and samplers. A directory is complete or not there."""

    def __init__(self, database: Database, backend: Backend, root: Path, quotas: Quotas):
        self._database = database
        self._quotas = quotas
        self._backend = backend
        self._root = root
        self._copying = asyncio.Lock()

    async def save(self, request: Row, model: Row) -> dict[str, Any]:
        """save_weights and save_weights_for_sampler, when their turn has come."""
        body = json.loads(request.body)
        kind = "weights" if request.kind == "save_weights" else "sampler_weights"
        name = body.get("path")
        if kind == "sampler_weights" and body.get("sampling_session_seq_id") is not None:
            return await self._save_for_session(request, model, body)
        path = CheckpointPath.make(model.id, kind, name or f"{request.number:08d}")
        there = self._database.get(checkpoints, str(path))
        if there is not None and there.request != request.id:
            if not body.get("overwrite"):
                raise UserError(f"{path} is there already; choose another name, or set overwrite")
        elif there is not None:  # written before a restart
            return {"path": str(path), "type": request.kind}
        old_bytes = there.num_bytes if there is not None else 0
        await self._write(model, path.directory(self._root), kind == "weights", old_bytes)
        self._insert(path, model.tenant, request.id, model.lora, body, old_bytes)
        return {"path": str(path), "type": request.kind}

    def _insert(
        self, path: CheckpointPath, tenant: str, request: str, lora: Any, body: Mapping[str, Any],
        old_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Its row, in the place of one with this path, of old_bytes, that there may be: one transaction."""
        directory, ttl = path.directory(self._root), body.get("ttl_seconds")
        num_bytes = size_of(directory)
        self._database.change(
            checkpoints.delete().where(checkpoints.c.path == str(path)),
            checkpoints.insert().values(
                path=str(path), model=path.model_id, tenant=tenant, kind=path.kind, name=path.name,
                request=request, directory=self._relative(directory), lora=lora, created=now(),
                num_bytes=num_bytes, public=False, expires=now() + ttl if ttl else None,
                user_metadata=body.get("user_metadata"),
            ),
            durable=True,
        )  # fmt: skip
        self._quotas.add(tenant, num_bytes - old_bytes)

    async def copy(self, source: Row, tenant: str, model: str, ttl_seconds: int | None) -> CheckpointPath:
        """A checkpoint of this tenant's own, under a model's id. The same once more is the same copy."""
        made_of = f"{source.path} of {source.created!r}"
        suffix = hashlib.blake2b(made_of.encode(), digest_size=6).hexdigest()
        path = CheckpointPath.make(model, source.kind, f"{source.name[:100]}-copy-{suffix}")
        directory = path.directory(self._root)
        async with self._copying:
            if self._database.get(checkpoints, str(path)) is not None:
                return path
            self._quotas.check(tenant, source.num_bytes)
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
            self._quotas.check_count(samplers, model.tenant)
            directory = self._of_samplers(model.session) / str(request.number)
            await self._write(model, directory, optimizer=False)
            num_bytes = size_of(directory)
            if inflight:
                newest = samplers.c.inflight_of == model.id
                self._database.update(samplers, newest, directory=self._relative(directory))
            self._database.insert(
                samplers, id=id, session=model.session, tenant=model.tenant, model_path=None,
                directory=self._relative(directory), inflight_of=model.id if inflight else None,
                created=now(), num_bytes=num_bytes,
            )  # fmt: skip
            self._quotas.add(model.tenant, num_bytes)
            revive(self._database, model.session)
        return {"path": None, "sampling_session_id": id, "type": "save_weights_for_sampler"}

    async def _write(self, model: Row, directory: Path, optimizer: bool, old_bytes: int = 0) -> None:
        """Raises UserError where the tenant has no room for it in the place of one of old_bytes."""
        async with _complete(directory) as partial:
            await self._backend.save(model.id, partial, optimizer)
            self._quotas.check(model.tenant, size_of(partial) - old_bytes)

    def readable(self, tenant: str, path: str) -> Row:
        """A checkpoint of this tenant's, or one that is public."""
        row = self._database.get(checkpoints, str(CheckpointPath.parse(path)))
        if row is None or (row.tenant != tenant and not row.public):
            raise NotFound(f"there is no checkpoint {path}")
        return row

    def own(self, tenant: str, model: str, kind: str, name: str) -> Row:
        """This tenant's own."""
        row = self._database.get(checkpoints, str(CheckpointPath.make(model, kind, name)))
        if row is None or row.tenant != tenant:
            raise NotFound(f"there is no checkpoint {kind}/{name} of {model}")
        return row

    def list(
        self, tenant: str, model: str | None = None, limit: int = MOST_LISTED, offset: int = 0
    ) -> Sequence[Row]:
        """The newest first."""
        where = [checkpoints.c.tenant == tenant, *([checkpoints.c.model == model] if model else [])]
        newest = checkpoints.c.created.desc()
        return self._database.find(checkpoints, *where, order=newest, limit=limit, offset=offset)

    def count(self, tenant: str) -> int:
        return self._database.count(checkpoints, checkpoints.c.tenant == tenant)

    def newest(self, model: Row, kind: str) -> Row | None:
        where = (
            checkpoints.c.model == model.id,
            checkpoints.c.tenant == model.tenant,
            checkpoints.c.kind == kind,
        )
        rows = self._database.find(checkpoints, *where, order=checkpoints.c.created.desc(), limit=1)
        return rows[0] if rows else None

    def change(self, checkpoint: Row, **values: Any) -> None:
        self._database.update(checkpoints, checkpoints.c.path == checkpoint.path, **values)

    def delete(self, checkpoint: Row) -> None:
        self._database.delete(checkpoints, checkpoints.c.path == checkpoint.path)
        self._quotas.add(checkpoint.tenant, -checkpoint.num_bytes)
        shutil.rmtree(self._root / checkpoint.directory, ignore_errors=True)

    async def drop_samplers(self, sessions: Sequence[Row]) -> None:
        """Of sessions that are over, with the weights that were written for them alone."""
        own = samplers.c.session.in_([session.id for session in sessions])
        totals = (
            select(samplers.c.tenant, func.sum(samplers.c.num_bytes)).where(own).group_by(samplers.c.tenant)
        )
        freed = self._database.rows(totals)
        if freed:
            self._database.delete(samplers, own)
        for tenant, num_bytes in freed:
            self._quotas.add(tenant, -int(num_bytes or 0))
        for directory in map(self._of_samplers, (session.id for session in sessions)):
            if directory.exists():
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _relative(self, directory: Path) -> str:
        """As rows name it: the server's directory may be moved."""
        return str(directory.relative_to(self._root))

    def _of_samplers(self, session: str) -> Path:
        return self._root / "samplers" / session

    async def sweep(self) -> bool:
        """A few of those past their time go; whether there are more."""
        rows = self._database.find(
            checkpoints, checkpoints.c.expires < now(), order=checkpoints.c.expires, limit=_PIECE
        )
        for row in rows:
            self._database.delete(checkpoints, checkpoints.c.path == row.path)
            self._quotas.add(row.tenant, -row.num_bytes)
            await asyncio.to_thread(shutil.rmtree, self._root / row.directory, ignore_errors=True)
        return len(rows) == _PIECE


@asynccontextmanager
async def _complete(directory: Path) -> AsyncIterator[Path]:
    """Where to write it: it appears when it is complete, in the place of one that is overwritten."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        await asyncio.to_thread(sync_tree, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
    sync(directory.parent)


def revive(database: Database, session: str) -> None:
    """A session that was over has a sampler again: it ends once more."""
    database.update(sessions, sessions.c.id == session, sessions.c.ended.is_not(None), seen=now(), ended=None)
