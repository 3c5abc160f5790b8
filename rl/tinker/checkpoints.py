"""Checkpoints: what models were saved as, under a name or for one sampler: directories that PEFT opens."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from rl.tinker.backend import Backend, NotFound, UserError
from rl.tinker.database import Database, checkpoints, models, now, samplers, sessions
from rl.tinker.paths import CheckpointPath, new_directory


class Checkpoints:
    """Owns the directories of checkpoints and samplers.

    Each is written once, under a path that no other ever has. It is complete once a row names it. What no row
    names was left by a server that was killed.
    """

    def __init__(self, database: Database, backend: Backend, root: Path):
        self._database = database
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
        with new_directory(path.parent(self._root), path.name) as directory:
            await self._backend.save(model.id, directory, optimizer=kind == "weights")
            self._put(path, directory, model.tenant, request.id, model.lora, body)
        return {"path": str(path), "type": request.kind}

    def _put(
        self, path: CheckpointPath, directory: Path, tenant: str, request: str, lora: Any,
        body: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """The checkpoint is what the directory has. One that it replaces is removed."""
        before, ttl = self._database.get(checkpoints, str(path)), body.get("ttl_seconds")
        values = {
            "model": path.model_id, "tenant": tenant, "kind": path.kind, "name": path.name,
            "request": request, "directory": self._relative(directory), "lora": lora, "created": now(),
            "num_bytes": _size(directory), "public": False, "expires": now() + ttl if ttl else None,
            "user_metadata": body.get("user_metadata"),
        }  # fmt: skip
        if before is None:
            self._database.insert(checkpoints, path=str(path), **values)
        else:
            self.change(before, **values)
            shutil.rmtree(self._root / before.directory, ignore_errors=True)

    async def copy(self, source: Row, tenant: str, model: str, ttl_seconds: int | None) -> CheckpointPath:
        """A checkpoint of this tenant's own, under a model's id. The same once more is the same copy."""
        made_of = f"{source.path} of {source.created!r}"
        suffix = hashlib.blake2b(made_of.encode(), digest_size=6).hexdigest()
        path = CheckpointPath.make(model, source.kind, f"{source.name[:100]}-copy-{suffix}")
        copied = {"ttl_seconds": ttl_seconds, "user_metadata": source.user_metadata}
        async with self._copying:
            if self._database.get(checkpoints, str(path)) is not None:
                return path
            with new_directory(path.parent(self._root), path.name) as directory:
                try:
                    await asyncio.to_thread(shutil.copytree, self._root / source.directory, directory)
                except (FileNotFoundError, shutil.Error) as error:  # it was deleted meanwhile
                    raise NotFound(f"there is no checkpoint {source.path}") from error
                self._put(path, directory, tenant, f"copy of {source.path}", source.lora, copied)
        return path

    async def _save_for_session(self, request: Row, model: Row, body: Mapping[str, Any]) -> dict[str, Any]:
        """Weights without a name, for one sampler."""
        id = f"{model.session}:sample:{body['sampling_session_seq_id']}"
        inflight = body.get("kind") == "inflight"
        if self._database.get(samplers, id) is None:
            with new_directory(self._of_samplers(model.session), str(request.number)) as directory:
                await self._backend.save(model.id, directory, optimizer=False)
                if inflight:
                    newest = samplers.c.inflight_of == model.id
                    self._database.update(samplers, newest, directory=self._relative(directory))
                self._database.insert(
                    samplers, id=id, session=model.session, tenant=model.tenant, model_path=None,
                    directory=self._relative(directory), inflight_of=model.id if inflight else None,
                    created=now(),
                )  # fmt: skip
        return {"path": None, "sampling_session_id": id, "type": "save_weights_for_sampler"}

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

    def list(self, tenant: str, model: str | None = None) -> Sequence[Row]:
        where = [checkpoints.c.tenant == tenant, *([checkpoints.c.model == model] if model else [])]
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

    def remove_remnants(self) -> None:
        """At the start: directories that no row names.

        Of sessions that the database knows, because another database may be this directory's.
        """
        find = self._database.find
        known = {session.id for session in find(sessions)}
        rows = [*find(checkpoints), *find(samplers)]
        named = {row.directory for row in rows} | {model.snapshot for model in find(models)}
        for pattern in ("samplers/*/*", "models/*/*", "checkpoints/*/*/*"):
            for directory in self._root.glob(pattern):
                relative = self._relative(directory)
                session = Path(relative).parts[1].partition("-")[0]  # of a model's id too: directory_name
                if session in known and relative not in named:
                    shutil.rmtree(directory, ignore_errors=True)

    def sweep(self) -> None:
        """Those past their time go."""
        for row in self._database.find(checkpoints, checkpoints.c.expires < now()):
            self.delete(row)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
