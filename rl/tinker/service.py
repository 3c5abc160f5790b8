"""Service: sessions, models, samplers and checkpoints of many tenants. It knows neither HTTP nor torch."""

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from rl.tinker.backend import Backend, NotFound, UserError
from rl.tinker.blame import Blame
from rl.tinker.checkpoints import MOST_LISTED, Checkpoints, revive
from rl.tinker.database import Database, models, now, requests, samplers, sessions
from rl.tinker.limits import Limits
from rl.tinker.paths import CheckpointPath
from rl.tinker.quotas import Quotas
from rl.tinker.requests import Requests
from rl.tinker.retention import Retention
from rl.tinker.sample_scheduler import SampleScheduler
from rl.tinker.sampling import Sampling
from rl.tinker.settings import check_adam, check_fits, check_metadata, check_ttl, read_lora
from rl.tinker.training import Training
from rl.types import LoRA, OptimParams
from rl.waiting import beside


class Service:
    """`run` works until it is cancelled; every other method returns at once."""

    def __init__(
        self,
        database: Database,
        backend: Backend,
        root: Path,
        model_names: tuple[str, ...],
        eos_ids: tuple[int, ...],
        limits: Limits = Limits(),
        capacity: int = 256,
        shared_samples: int = 8,
    ):
        """model_names: of the base model, the first its own. root: of checkpoints.

        capacity, shared_samples: see SamplingQueue.
        """
        self.backend = backend
        self.model_names = model_names
        self.limits = limits
        self.quotas = Quotas(database, root, limits)
        self.queue = Requests(database, limits.max_waiting, self.quotas)
        self.checkpoints = Checkpoints(database, backend, root, self.quotas)
        self._blame = Blame(limits.max_deaths)
        self.training = Training(
            database, self.queue, backend, root, self.checkpoints.save, limits, self._blame
        )
        self._scheduler = SampleScheduler(capacity, shared_samples, limits)
        self.sampling = Sampling(
            database, self.queue, backend, root, eos_ids, limits, self._scheduler, self._blame
        )
        is_used = self.training.loaded.__contains__
        self.retention = Retention(database, self.queue, self.checkpoints, self.quotas, is_used, root, limits)
        self._database = database

    async def run(self) -> None:
        """What a restart found unfinished goes on."""
        self.checkpoints.remove_remnants()
        for request in self.queue.unfinished():
            if request.kind == "sample":
                self.sampling.resume(request)
            else:
                self.training.submit(request)
        try:
            async with beside(self.training.run(), self._scheduler.run(), self.retention.run()):
                await asyncio.Event().wait()
        finally:  # before the generators end, which would fail what they sample
            await self.sampling.stop()
            self.queue.stop()

    # ---- sessions

    def create_session(self, tenant: str, display_name: str | None, user_metadata: Any) -> str:
        id = secrets.token_hex(16)
        check_metadata(user_metadata, display_name)
        self.quotas.check_count(sessions, tenant)
        self._database.insert(
            sessions, id=id, tenant=tenant, created=now(), seen=now(), display_name=display_name,
            user_metadata=user_metadata,
        )  # fmt: skip
        return id

    def session(self, tenant: str, id: str) -> Row:
        return self._own(sessions, id, tenant, "session")

    def heartbeat(self, tenant: str, id: str) -> None:
        self.session(tenant, id)
        self._database.update(sessions, sessions.c.id == id, seen=now())

    async def finish_session(self, tenant: str, id: str) -> None:
        """Its samplers go, with the weights that have no name. Models and checkpoints stay."""
        await self.retention.end([self.session(tenant, id)])

    # ---- models

    def create_model(
        self, tenant: str, session: str, number: int, base_model: str, body: Mapping[str, Any]
    ) -> str:
        """body: lora_config, user_metadata. Returns the id of the request."""
        self.session(tenant, session)
        self._check_base(base_model)
        lora, seed = read_lora(body.get("lora_config"), self.limits.max_rank)
        return self._begin_model(tenant, session, number, lora, seed, None, False, body)

    def create_model_from(
        self, tenant: str, session: str, number: int, path: str, optimizer: bool, body: Mapping[str, Any]
    ) -> str:
        self.session(tenant, session)
        if body.get("base_model"):
            self._check_base(body["base_model"])
        checkpoint = self.checkpoints.loadable(tenant, path)
        self._check_optimizer(checkpoint, optimizer)
        lora = LoRA.from_record(checkpoint.lora)
        return self._begin_model(tenant, session, number, lora, 0, checkpoint.directory, optimizer, body)

    def _begin_model(
        self, tenant: str, session: str, number: int, lora: LoRA, seed: int, source: str | None,
        optimizer: bool, body: Mapping[str, Any],
    ) -> str:  # fmt: skip
        id = f"{session}:train:{number}"
        check_metadata(body.get("user_metadata"))
        known = self._database.get(models, id)
        if known is None:
            self._insert_model(id, session, tenant, asdict(lora), seed, source, optimizer, body)
        elif known.source != source:
            raise UserError(f"{id} is there already, with other weights; take another model_seq_id")
        return self.submit(tenant, "create_model", id, 0, json.dumps(dict(body)).encode())

    def _insert_model(
        self, id: str, session: str, tenant: str, lora: Any, seed: int, source: str | None, optimizer: bool,
        body: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.quotas.check_count(models, tenant)
        self._database.insert(
            models, id=id, session=session, tenant=tenant, lora=lora, seed=seed, source=source,
            source_optimizer=optimizer, snapshot_number=0, created=now(), seen=now(),
            user_metadata=body.get("user_metadata"),
        )  # fmt: skip

    async def copy_weights(
        self, tenant: str, session: str, number: int, path: str, ttl_seconds: int | None
    ) -> str:
        """Of this tenant's, or published ones: to a model of the session, which is made if there is none."""
        self.session(tenant, session)
        check_ttl(ttl_seconds)
        source, id = self.checkpoints.loadable(tenant, path), f"{session}:train:{number}"
        copy = await self.checkpoints.copy(source, tenant, id, ttl_seconds)
        if self._database.get(models, id) is None:
            copied_to = self.checkpoints.own(tenant, id, copy.kind, copy.name).directory
            self._insert_model(id, session, tenant, source.lora, 0, copied_to, copy.kind == "weights", {})
        return str(copy)

    def list_models(self, tenant: str, limit: int, offset: int) -> Sequence[Row]:
        """The newest first."""
        own = models.c.tenant == tenant, self.retention.was_run()
        return self._database.find(models, *own, order=models.c.created.desc(), limit=limit, offset=offset)

    def count_models(self, tenant: str) -> int:
        own = models.c.tenant == tenant, self.retention.was_run()
        return self._database.count(models, *own)

    def models_of(self, session: Row) -> Sequence[Row]:
        return self._database.find(models, models.c.session == session.id, limit=MOST_LISTED)

    def list_sessions(self, tenant: str, limit: int, offset: int) -> Sequence[Row]:
        """The newest first."""
        own, newest = sessions.c.tenant == tenant, sessions.c.created.desc()
        return self._database.find(sessions, own, order=newest, limit=limit, offset=offset)

    def model(self, tenant: str, id: str) -> Row:
        row = self._own(models, id, tenant, "model")
        if row.seen < self.retention.oldest_use():  # it goes at the next sweep
            raise NotFound(f"there is no model {id[:200]} any more: it was not used for too long")
        return row

    def training_run(self, tenant: str, id: str) -> Row:
        """A model that is in use, or of which checkpoints are left."""
        own = models.c.id == id, models.c.tenant == tenant, self.retention.was_run()
        if not (rows := self._database.find(models, *own)):
            raise NotFound(f"there is no training run {id[:200]}")
        return rows[0]

    def owns_model(self, tenant: str, id: str) -> bool:
        row = self._database.get(models, id)
        return row is not None and row.tenant == tenant

    def submit(self, tenant: str, kind: str, model: str, seq_id: int, body: bytes) -> str:
        """A request of a model. The same seq_id once more is the same request."""
        row = self.model(tenant, model)
        if seq_id < 1 and kind != "create_model":
            raise UserError("seq_id has to be at least 1, and another for each request")
        request, is_new = self.queue.submit(f"{model}:{seq_id}", tenant, kind, model, body)
        if is_new:
            self.training.submit(request)
            self.retention.use(row)
        return request.id

    def load_weights(self, tenant: str, model: str, seq_id: int, path: str, optimizer: bool) -> str:
        checkpoint = self.checkpoints.loadable(tenant, path)
        self._check_optimizer(checkpoint, optimizer)
        check_fits(checkpoint, self.model(tenant, model))
        body = {"path": path, "optimizer": optimizer}
        return self.submit(tenant, "load_weights", model, seq_id, json.dumps(body).encode())

    def optim_step(self, tenant: str, model: str, seq_id: int, adam: Mapping[str, float]) -> str:
        """adam: Tinker's AdamParams."""
        check_adam(adam)
        lr, eps, decay, clip = (adam[k] for k in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"))
        betas = adam["beta1"], adam["beta2"]
        params = OptimParams(lr, betas=betas, eps=eps, weight_decay=decay, max_grad_norm=clip)
        return self.submit(
            tenant, "optim_step", model, seq_id, json.dumps({"params": asdict(params)}).encode()
        )

    def save(self, tenant: str, kind: str, model: str, seq_id: int, body: Mapping[str, Any]) -> str:
        """kind: one of those that `Checkpoints.save` carries out."""
        if body.get("path"):
            CheckpointPath.make(model, "weights", body["path"])
        check_ttl(body.get("ttl_seconds"))
        check_metadata(body.get("user_metadata"))
        return self.submit(tenant, kind, model, seq_id, json.dumps(dict(body)).encode())

    def _check_base(self, name: str) -> None:
        if name not in self.model_names:
            raise UserError(f"this server has no base model {name!r}; it has {list(self.model_names)}")

    def _check_optimizer(self, checkpoint: Row, optimizer: bool) -> None:
        if optimizer and checkpoint.kind != "weights":
            raise UserError(
                f"{checkpoint.path} has weights for sampling alone; load it without its optimizer"
            )

    # ---- sampling

    def create_sampler(
        self, tenant: str, session: str, number: int, base_model: str | None, model_path: str | None
    ) -> str:
        self.session(tenant, session)
        directory = None
        if model_path:
            directory = self.checkpoints.loadable(tenant, model_path).directory
        elif base_model:
            self._check_base(base_model)
        else:
            raise UserError("a sampling session needs base_model or model_path")
        id = f"{session}:sample:{number}"
        if self._database.get(samplers, id) is None:
            self.quotas.check_count(samplers, tenant)
            self._database.insert(
                samplers, id=id, session=session, tenant=tenant, model_path=model_path or None,
                directory=directory, inflight_of=None, created=now(), num_bytes=0,
            )  # fmt: skip
            revive(self._database, session)
        return id

    def sampler(self, tenant: str, id: str) -> Row:
        return self._own(samplers, id, tenant, "sampling session")

    def list_samplers(self, session: str) -> Sequence[Row]:
        return self._database.find(samplers, samplers.c.session == session, limit=MOST_LISTED)

    def sample(self, tenant: str, sampler: str, seq_id: int, body: Mapping[str, Any]) -> str:
        if path := self.sampler(tenant, sampler).model_path:
            self.checkpoints.readable(tenant, path)
        load = self.sampling.check(tenant, body)
        request, is_new = self.queue.submit(
            f"{sampler}:{seq_id}", tenant, "sample", sampler, json.dumps(dict(body)).encode()
        )
        if is_new:
            self.sampling.submit(request, load)
        return request.id

    def sampled_directory(self, tenant: str, model: str) -> str | None:
        """Of a checkpoint; None for a name of the base model. Raises UserError and NotFound for others."""
        if model.startswith("tinker://"):
            return self.checkpoints.loadable(tenant, model).directory
        self._check_base(model)
        return None

    def cancel(self, tenant: str, request_id: str) -> None:
        row = self._database.get(requests, request_id, "id")
        if row is None or row.tenant != tenant:
            raise NotFound(f"there is no request {request_id}")
        self.sampling.cancel(row)

    def _own(self, table: Any, id: str, tenant: str, kind: str) -> Row:
        row = self._database.get(table, id)
        if row is None or row.tenant != tenant:
            raise NotFound(f"there is no {kind} {id[:200]}")
        return row
