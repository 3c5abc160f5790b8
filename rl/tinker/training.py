"""Training: the models in the training engine, and the one at a time that works.

Each model's requests run in the order in which they came; tenants get equal shares of the engine's time (see
TrainingQueue). What a model has learned since its last snapshot is in its requests, which are kept until the
next one: a model that is not in the engine (after a restart, after the engine died, or because others needed
its place) is its snapshot, and its requests since then once more. So an optim_step that was acknowledged is
neither lost nor done twice.

A request that failed is not done again. Where it would have changed the model, the model's gradient is gone;
otherwise nothing has changed. One with which the engine, or the server, died is tried once more, as the first
one after the start; then it has failed.
"""

import asyncio
import json
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from rl.errors import NotFinite, RunError
from rl.paths import sync_tree
from rl.tinker import losses, wire
from rl.tinker.backend import Backend, ModelsLost, UserError
from rl.tinker.blame import Blame
from rl.tinker.connection import Unavailable
from rl.tinker.database import Database, checkpoints, models
from rl.tinker.history import last_change, last_number, to_repeat
from rl.tinker.limits import Limits
from rl.tinker.loaded_models import LoadedModel, next_to_leave
from rl.tinker.paths import directory_name, new_directory
from rl.tinker.quotas import size_of
from rl.tinker.rate import Rate
from rl.tinker.requests import CHANGES, COMPUTES, JSON, Requests
from rl.tinker.training_queue import TrainingQueue
from rl.types import LoRA, OptimParams

_ATTEMPTS = 2
_log = logging.getLogger(__name__)


class Training:
    """Owns every model in the engine."""

    def __init__(
        self,
        database: Database,
        queue: Requests,
        backend: Backend,
        root: Path,
        save: Callable[[Row, Row, Mapping[str, Any]], Any],
        limits: Limits,
        blame: Blame,
    ):
        """save(request, model, body): carries out a request that writes a checkpoint; returns its result."""
        self._blame = blame
        self._database = database
        self._queue = queue
        self._backend = backend
        self._root = root
        self._save = save
        self._limits = limits
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()  # the one used longest ago first
        self._waiting = TrainingQueue()
        self._arrived = asyncio.Event()
        self.done = Rate()

    def submit(self, request: Row) -> None:
        self._waiting.add(request)
        self._arrived.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            began = time.monotonic()
            if idle := self._waiting.idle_for():
                tenant, seconds = idle
                self._arrived.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._arrived.wait()
                self._waiting.charge_idle(tenant, time.monotonic() - began)
                continue
            request = self._waiting.take()
            await self._answer(request)
            await self._queue.written()
            self._waiting.end(request.tenant, time.monotonic() - began)

    async def _answer(self, request: Row) -> None:
        try:
            result, media_type = await self._database.patiently(partial(self._attempt, request))
            self._queue.done(request, result, media_type)
            self.done.add(1)
            await self._queue.written()
            await self._database.patiently(partial(self._keep, request))
        except UserError as error:
            state = self._loaded.get(request.target)
            if state is not None and state.has_gradient:  # an engine that refuses drops it
                await self._unload(request)
            self._queue.failed(request, str(error), "user", refused=True)
        except NotFinite as error:
            self._queue.failed(request, str(error), "user")
        except RunError as error:
            await self._unload(request)
            self._queue.failed(request, str(error), "server")
        except Exception as error:
            _log.exception("request %s failed", request.id)
            await self._unload(request)
            self._queue.failed(request, f"{request.kind} failed: {error!r}", "server")

    async def _attempt(self, request: Row) -> tuple[Any, str]:
        if request.deaths >= _ATTEMPTS:
            raise RunError(
                f"the server died {request.deaths} times while this {request.kind} ran, so it is not tried "
                f"again"
            )
        if request.kind in COMPUTES:
            self._blame.check(request.tenant)
        self._queue.begin(request)
        for _ in range(_ATTEMPTS):
            try:
                return await self._execute(request)
            except ModelsLost as error:
                self._loaded.clear()
                if request.kind in COMPUTES:
                    self._blame.add(request.tenant)
                death = error
        gone = "; the model's gradient is gone" if request.kind in CHANGES else ""
        raise RunError(
            f"the training engine died {_ATTEMPTS} times while this {request.kind} ran, so it is not tried "
            f"again{gone}: {death}"
        ) from death

    async def _unload(self, request: Row) -> None:
        """Whatever has become of its model in the engine: it comes back as its requests say that it is."""
        if request.kind in CHANGES and self._loaded.pop(request.target, None) is not None:
            try:
                await self._backend.remove(request.target)
            except ModelsLost:
                self._loaded.clear()

    async def _execute(self, request: Row) -> tuple[Any, str]:
        model = self._database.get(models, request.target)
        assert model is not None  # it is made before its first request
        state = await self._bring(model, request.number)
        if request.kind == "create_model":
            if model.source is None:
                return {"model_id": model.id, "type": "create_model"}, JSON
            path = json.loads(self._queue.body(request))["path"]
            return {"model_id": model.id, "path": path, "type": "load_weights"}, JSON
        if request.kind in (*CHANGES, "forward"):
            return await self._apply(model, request, state)
        return await self._save(request, model, json.loads(self._queue.body(request))), JSON

    async def _keep(self, request: Row) -> None:
        """A snapshot, if it is time: once the result is kept, or a restart would do the request again."""
        model, state = self._database.get(models, request.target), self._loaded.get(request.target)
        if model is None or state is None or state.has_gradient:
            return
        if not state.needs_checkpoint and state.num_steps < self._limits.snapshot_every:
            return
        try:
            await self._try_snapshot(model, request.number, state)
        except ModelsLost:
            self._loaded.clear()

    async def _apply(self, model: Row, request: Row, state: LoadedModel) -> tuple[Any, str]:
        """A forward, or one that changes the model: for the first time, or once more."""
        if request.kind in ("forward", "forward_backward"):
            asked = wire.read_forward_backward(self._queue.body(request))
            losses.check(asked.data, asked.loss, self._backend.context_length, self._backend.vocab_size)
            losses.make_loss(asked.loss, asked.config)
            try:
                learned = await self._backend.forward_backward(
                    model.id, asked.data, asked.loss, asked.config, asked.forward_only
                )
            except RunError:
                state.has_gradient &= asked.forward_only  # engines keep no half of one
                raise
            state.has_gradient |= not asked.forward_only
            return wire.write_learned(learned), wire.PROTOBUF
        body = json.loads(self._queue.body(request))
        if request.kind == "optim_step":
            if not state.has_gradient:  # tinker-cookbook's, where a minibatch has nothing to learn from
                if last_change(self._database, request) == "forward_backward":
                    raise UserError("optim_step without a gradient: the forward_backward before it failed")
                return {"metrics": {"grad_norm:mean": 0.0}}, JSON
            state.has_gradient = False
            state.num_steps += 1
            metrics = await self._backend.optim_step(model.id, OptimParams(**body["params"]))
            return {"metrics": {f"{name}:mean": value for name, value in metrics.items()}}, JSON
        await self._backend.load(model.id, self._checkpoint(body["path"], request), body["optimizer"])
        state.has_gradient, state.needs_checkpoint = False, True
        return {"path": body["path"], "model_id": model.id, "type": "load_weights"}, JSON

    async def _bring(self, model: Row, before: int) -> LoadedModel:
        """The model is in the engine, as it was before the request with this number."""
        if model.id not in self._loaded:
            await self._make_room(model.tenant)
            await self._load(model)
            try:
                self._loaded[model.id] = await self._do_again(model, before)
            except ModelsLost:
                raise
            except Exception:  # a part of it is not it
                await self._backend.remove(model.id)
                raise
        self._loaded.move_to_end(model.id)
        return self._loaded[model.id]

    async def _load(self, model: Row) -> None:
        if model.snapshot is not None:
            await self._backend.load(model.id, self._root / model.snapshot, True)
        elif model.source is not None:
            if not (self._root / model.source).is_dir():
                raise UserError(f"the checkpoint that {model.id} begins from is gone; create another model")
            await self._backend.load(model.id, self._root / model.source, model.source_optimizer)
        else:
            await self._backend.create(model.id, LoRA.from_record(model.lora), model.seed)

    def _checkpoint(self, path: str, request: Row) -> Path:
        """What it is when the request's turn comes: those before it may have saved another under its name."""
        row = self._database.get(checkpoints, path)
        is_newer = row and request.finished and row.created > request.finished  # the request is done again
        if row is None or is_newer or not (row.public or row.tenant == request.tenant):
            raise UserError(f"{path} was overwritten or deleted before it was loaded; load another")
        return self._root / row.directory

    async def _do_again(self, model: Row, before: int) -> LoadedModel:
        """Its requests since the snapshot. Raises RunError where one that worked now fails."""
        state = LoadedModel(model.tenant, needs_checkpoint=bool(model.source and not model.snapshot))
        for request in to_repeat(self._database, model, before):
            try:
                await self._apply(model, request, state)
            except (ModelsLost, Unavailable):
                raise
            except Exception as error:
                raise RunError(
                    f"the model cannot be restored: its {request.kind} {request.id} worked, and now failed: "
                    f"{error}; load a checkpoint into a new model if this stays so"
                ) from error
        return state

    async def _make_room(self, tenant: str) -> None:
        """For a model of the tenant. What another has learned since its snapshot is done again later."""
        if len(self._loaded) < self._limits.max_models:
            return
        model_id = next_to_leave(self._loaded, tenant)
        state = self._loaded[model_id]
        model = self._database.get(models, model_id)
        assert model is not None
        if state.num_steps and not state.has_gradient:
            await self._try_snapshot(model, last_number(self._database, model_id), state)
        del self._loaded[model_id]
        await self._backend.remove(model_id)

    async def _try_snapshot(self, model: Row, number: int, state: LoadedModel) -> None:
        """As `_snapshot`. A failure costs nobody a request, and nothing is lost: its requests are kept."""
        try:
            await self._snapshot(model, number, state)
        except (ModelsLost, Unavailable):
            raise
        except Exception:  # a full disk
            _log.exception("no snapshot of %s", model.id)

    async def _snapshot(self, model: Row, number: int, state: LoadedModel) -> None:
        """After the request with this number, when there is no gradient."""
        before = self._database.get(models, model.id)
        assert before is not None
        if before.snapshot and before.snapshot_number == number:  # it was written, and that answer lost
            state.kept()
            return
        with new_directory(self._root / "models" / directory_name(model.id), str(number)) as directory:
            await self._backend.save(model.id, directory, True)
            await asyncio.to_thread(sync_tree, directory)  # before the only other copy goes
        snapshot = str(directory.relative_to(self._root))
        num_bytes = size_of(directory)
        self._queue.keep_snapshot(before, number, snapshot=snapshot, snapshot_bytes=num_bytes)
        state.kept()
        if before.snapshot:
            await asyncio.to_thread(shutil.rmtree, self._root / before.snapshot, ignore_errors=True)

    @property
    def loaded(self) -> Set[str]:
        """The models in the engine."""
        return self._loaded.keys()

    def queue_lengths(self, tenant: str) -> dict[str, int]:
        """Requests of each of its models with some."""
        return self._waiting.lengths(tenant)
