"""Checkpoints: what models were saved as, under a name or for one sampler: directories that PEFT opens."""

import asyncio
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.engine import Row

from rl.errors import RunError, one_line
from rl.paths import sync_tree
from rl.tinker.backend import Backend, NotFound, UserError
from rl.tinker.database import Database, checkpoints, models, now, samplers, sessions
from rl.tinker.encryption import encrypt
from rl.tinker.paths import EXTERNAL, CheckpointPath, new_directory
from rl.tinker.quotas import Quotas, size_of

MOST_LISTED = 1000
_PIECE = 100
_SAVED = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": EXTERNAL,
}
"""A request's kind -> that of its checkpoint."""


class Checkpoints:
    """Owns the directories of checkpoints and samplers.

    Each is written once, under a path that no other ever has. It is complete once a row names it. What no row
    names was left by a server that was killed.
    """

    def __init__(self, database: Database, backend: Backend, root: Path, quotas: Quotas):
        self._database = database
        self._quotas = quotas
        self._backend = backend
        self._root = root
        self._copying = asyncio.Lock()

    @property
    def root(self) -> Path:
        """The server's directory."""
        return self._root

    async def save(self, request: Row, model: Row, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request of `_SAVED`, when its turn has come."""
        kind = _SAVED[request.kind]
        name = body.get("path")
        if kind == "sampler_weights" and body.get("sampling_session_seq_id") is not None:
            return await self._save_for_session(request, model, body)
        path = CheckpointPath.make(model.id, kind, name or f"{request.number:08d}")
        existing = self._get(path)
        if existing is not None and existing.request != request.id:
            if not body.get("overwrite"):
                or_else = ", or set overwrite" if kind == "weights" else ""
                raise UserError(f"{path} is there already; choose another name{or_else}")
        elif existing is not None:  # written before a restart
            return {"path": str(path), "type": request.kind}
        recipients = body.get("age_encryption_recipients") or ()
        old_bytes = 0 if existing is None else existing.num_bytes
        with new_directory(path.parent(self._root), path.name) as directory:
            await self._write(model, directory, kind == "weights", recipients, old_bytes)
        # From here on a row may name the directory, also where the database's answer is lost.
        await self._put(path, directory, model.tenant, request.id, model.lora, body)
        return {"path": str(path), "type": request.kind}

    async def _put(
        self, path: CheckpointPath, directory: Path, tenant: str, request: str, lora: Any,
        body: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """The checkpoint is what the directory has. One that it replaces is removed."""
        before, ttl = self._database.get(checkpoints, str(path)), body.get("ttl_seconds")
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
        self._quotas.add(tenant, num_bytes - (0 if before is None else before.num_bytes))
        if before is not None:
            await self._remove(before)

    async def copy(self, source: Row, tenant: str, model: str, ttl_seconds: int | None) -> CheckpointPath:
        """A checkpoint of this tenant's own, under a model's id. The same once more is the same copy."""
        made_of = f"{source.path} of {source.created!r}"
        suffix = hashlib.blake2b(made_of.encode(), digest_size=6).hexdigest()
        path = CheckpointPath.make(model, source.kind, f"{source.name[:100]}-copy-{suffix}")
        copied = {"ttl_seconds": ttl_seconds, "user_metadata": source.user_metadata}
        async with self._copying:
            if self._get(path) is not None:
                return path
            self._quotas.check(tenant, source.num_bytes)
            with new_directory(path.parent(self._root), path.name) as directory:
                try:
                    await asyncio.to_thread(shutil.copytree, self._root / source.directory, directory)
                except OSError as error:  # shutil.Error is one
                    if not (self._root / source.directory).is_dir():  # it was deleted meanwhile
                        raise NotFound(f"there is no checkpoint {source.path}") from error
                    raise RunError(f"{source.path} could not be copied ({_cause(error)})") from error
                await asyncio.to_thread(sync_tree, directory)
            await self._put(path, directory, tenant, f"copy of {source.path}", source.lora, copied)
        return path

    async def _save_for_session(self, request: Row, model: Row, body: Mapping[str, Any]) -> dict[str, Any]:
        """Weights without a name, for one sampler."""
        id = f"{model.session}:sample:{body['sampling_session_seq_id']}"
        inflight_of = model.id if body.get("kind") == "inflight" else None
        if self._database.get(samplers, id) is None:
            self._quotas.check_count(samplers, model.tenant)
            same = samplers.c.inflight_of == inflight_of
            before = self._database.find(samplers, same, samplers.c.num_bytes > 0) if inflight_of else ()
            old_bytes = sum(row.num_bytes for row in before)
            with new_directory(self._of_samplers(model.session), str(request.number)) as directory:
                await self._write(model, directory, False, (), old_bytes)
            num_bytes, relative = size_of(directory), self._relative(directory)
            moves = [samplers.update().where(same).values(directory=relative, num_bytes=0)] if before else []
            row = samplers.insert().values(
                id=id, session=model.session, tenant=model.tenant, model_path=None, directory=relative,
                inflight_of=inflight_of, created=now(), num_bytes=num_bytes,
            )  # fmt: skip
            self._database.change(*moves, row)
            self._quotas.add(model.tenant, num_bytes - old_bytes)
            revive(self._database, model.session)
            for old in before:  # a request that has not read it yet reads the newest: see Sampling
                await self._remove(old)
        return {"path": None, "sampling_session_id": id, "type": "save_weights_for_sampler"}

    async def _write(
        self, model: Row, directory: Path, optimizer: bool, recipients: Sequence[str], old_bytes: int = 0
    ) -> None:
        """recipients: of age, where the files are for them alone.

        Raises UserError where the tenant has no room for it in the place of one of old_bytes.
        """
        await self._backend.save(model.id, directory, optimizer)
        if recipients:
            await asyncio.to_thread(encrypt, directory, recipients)
        self._quotas.check(model.tenant, size_of(directory) - old_bytes)
        await asyncio.to_thread(sync_tree, directory)

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

    def list(
        self, tenant: str, model: str | None = None, limit: int = MOST_LISTED, offset: int = 0
    ) -> Sequence[Row]:
        """The newest first."""
        where = [*_live(tenant), *([checkpoints.c.model == model] if model else [])]
        newest = checkpoints.c.created.desc()
        return self._database.find(checkpoints, *where, order=newest, limit=limit, offset=offset)

    def count(self, tenant: str) -> int:
        return self._database.count(checkpoints, *_live(tenant))

    def newest(self, tenant: str, models: Sequence[str]) -> dict[tuple[str, str], Row]:
        """(model, kind) -> the newest of the tenant's."""
        c, where = checkpoints.c, (*_live(tenant), checkpoints.c.model.in_(models))
        last = (
            select(c.model, c.kind, func.max(c.created).label("created"))
            .where(*where)
            .group_by(c.model, c.kind)
            .subquery()
        )
        same = [c[name] == last.c[name] for name in ("model", "kind", "created")]
        rows = self._database.rows(select(checkpoints).join(last, and_(*same)).where(*where))
        return {(row.model, row.kind): row for row in rows}

    def change(self, checkpoint: Row, **values: Any) -> None:
        self._database.update(checkpoints, checkpoints.c.path == checkpoint.path, **values)

    async def delete(self, checkpoint: Row) -> None:
        """Nothing where another has been saved under its name since the row was read."""
        current = self._database.get(checkpoints, checkpoint.path)
        if current is None or current.directory != checkpoint.directory:
            return
        self._database.delete(checkpoints, checkpoints.c.path == checkpoint.path)
        self._quotas.add(checkpoint.tenant, -checkpoint.num_bytes)
        await self._remove(checkpoint)

    async def _remove(self, saved: Row) -> None:
        """The directory of a checkpoint or sampler, which may hold gigabytes: beside the event loop."""
        await asyncio.to_thread(shutil.rmtree, self._root / saved.directory, ignore_errors=True)

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

    def remove_remnants(self) -> None:
        """At the start: directories that no row names.

        Of sessions that the database knows, because another database may be this directory's.
        """
        find = self._database.find
        known = {session.id for session in find(sessions)}
        rows = [*find(checkpoints), *find(samplers, samplers.c.num_bytes > 0)]
        named = {row.directory for row in rows} | {model.snapshot for model in find(models)}
        for pattern in ("samplers/*/*", "models/*/*", "checkpoints/*/*/*"):
            for directory in self._root.glob(pattern):
                relative = self._relative(directory)
                session = Path(relative).parts[1].partition("-")[0]  # of a model's id too: directory_name
                if session in known and relative not in named:
                    shutil.rmtree(directory, ignore_errors=True)

    async def sweep(self) -> bool:
        """A few of those past their time go; whether there are more."""
        rows = self._database.find(
            checkpoints, checkpoints.c.expires < now(), order=checkpoints.c.expires, limit=_PIECE
        )
        for row in rows:
            await self.delete(row)
        return len(rows) == _PIECE


def _cause(error: OSError) -> str:
    """copytree has one of each file that failed."""
    return str(error.args[0][0][2]) if isinstance(error, shutil.Error) else one_line(error)


def revive(database: Database, session: str) -> None:
    """A session that was over has a sampler again: it ends once more."""
    database.update(sessions, sessions.c.id == session, sessions.c.ended.is_not(None), seen=now(), ended=None)


def _live(tenant: str) -> tuple[Any, Any]:
    """A tenant's, but for those past their time."""
    return checkpoints.c.tenant == tenant, checkpoints.c.expires.is_(None) | (checkpoints.c.expires >= now())
