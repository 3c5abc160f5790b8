"""Training: the models in the training engine, and the one at a time that works.

Each model's requests run in the order in which they came; models take turns, one request each. What a model
has learned since its last snapshot is in its requests, which are kept until the next one: a model that is not
in the engine (after a restart, after the engine died, or because others needed its place) is its snapshot,
and its requests since then once more. So an optim_step that was acknowledged is neither lost nor done twice.
"""

import asyncio
import json
import logging
import shutil
from collections import OrderedDict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.engine import Row

from rl.errors import NotFinite, RunError
from rl.tinker import losses, wire
from rl.tinker.backend import Backend, ModelsLost, UserError
from rl.tinker.database import Database, models, now, requests
from rl.tinker.paths import directory_name, new_directory
from rl.tinker.rate import Rate
from rl.tinker.requests import CHANGES, JSON, Requests
from rl.types import LoRA, OptimParams

_ATTEMPTS = 3
_log = logging.getLogger(__name__)


@dataclass
class _Loaded:
    """A model in the engine."""

    has_gradient: bool = False
    num_steps: int = 0  # since its snapshot


class Training:
    """Owns every model in the engine."""

    def __init__(
        self,
        database: Database,
        queue: Requests,
        backend: Backend,
        root: Path,
        save: Callable[[Row, Row], Any],
        snapshot_every: int,
        max_models: int,
    ):
        """save(request, model): carries out a request that writes a checkpoint; returns its result.

        max_models: in the engine at a time.
        """
        self._database = database
        self._queue = queue
        self._backend = backend
        self._root = root
        self._save = save
        self._snapshot_every = snapshot_every
        self._max_models = max_models
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # the one used longest ago first
        self._waiting: OrderedDict[str, deque[Row]] = OrderedDict()  # by model, whose turn is next first
        self._arrived = asyncio.Event()
        self.done = Rate()

    def submit(self, request: Row) -> None:
        self._waiting.setdefault(request.target, deque()).append(request)
        self._arrived.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            model_id, own = self._waiting.popitem(last=False)
            request = own.popleft()
            if own:
                self._waiting[model_id] = own  # behind the others
            await self._answer(request)

    async def _answer(self, request: Row) -> None:
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    result, media_type = await self._execute(request)
                    break
                except ModelsLost:
                    self._loaded.clear()
                    if attempt + 1 == _ATTEMPTS:
                        raise
            self._queue.done(request, result, media_type)
            self.done.add(1)
            await self._keep(request)
        except UserError as error:
            self._queue.failed(request, str(error), "user", refused=True)
        except NotFinite as error:
            self._queue.failed(request, str(error), "user")
        except RunError as error:
            self._queue.failed(request, str(error), "server")
        except Exception as error:
            _log.exception("request %s failed", request.id)
            self._queue.failed(request, f"{request.kind} failed: {error!r}", "server")

    async def _execute(self, request: Row) -> tuple[Any, str]:
        model = self._database.get(models, request.target)
        assert model is not None  # it is made before its first request
        state = await self._bring(model, request.number)
        if request.kind == "create_model":
            if model.source is None:
                return {"model_id": model.id, "type": "create_model"}, JSON
            path = json.loads(request.body)["path"]
            return {"model_id": model.id, "path": path, "type": "load_weights"}, JSON
        if request.kind in (*CHANGES, "forward"):
            return await self._apply(model, request, state)
        return await self._save(request, model), JSON

    async def _keep(self, request: Row) -> None:
        """A snapshot, if it is time: once the result is kept, or a restart would do the request again."""
        model, state = self._database.get(models, request.target), self._loaded.get(request.target)
        if model is None or state is None or state.has_gradient:
            return
        # A checkpoint that a model was loaded from may be deleted while the model lives.
        loaded = request.kind == "load_weights" or (request.kind == "create_model" and model.source)
        if not loaded and state.num_steps < self._snapshot_every:
            return
        try:
            await self._snapshot(model, request.number, state)
        except ModelsLost:
            self._loaded.clear()
        except RunError:  # its requests are all still there
            _log.exception("no snapshot of %s", model.id)

    async def _apply(self, model: Row, request: Row, state: _Loaded) -> tuple[Any, str]:
        """A forward, or one that changes the model: for the first time, or once more."""
        if request.kind in ("forward", "forward_backward"):
            asked = wire.read_forward_backward(request.body)
            backend = self._backend
            losses.check(asked.data, asked.loss, backend.context_length, backend.vocab_size)
            losses.make_loss(asked.loss, asked.config)
            try:
                learned = await backend.forward_backward(
                    model.id, asked.data, asked.loss, asked.config, asked.forward_only
                )
            except RunError:
                state.has_gradient &= asked.forward_only  # engines keep no half of one
                raise
            state.has_gradient |= not asked.forward_only
            return wire.write_learned(learned), wire.PROTOBUF
        body = json.loads(request.body)
        if request.kind == "optim_step":
            if not state.has_gradient:
                raise UserError("optim_step without a gradient; call forward_backward first")
            state.has_gradient = False
            state.num_steps += 1
            metrics = await self._backend.optim_step(model.id, OptimParams(**body["params"]))
            return {"metrics": {f"{name}:mean": value for name, value in metrics.items()}}, JSON
        await self._backend.load(model.id, self._root / body["directory"], body["optimizer"])
        state.has_gradient = False
        return {"path": body["path"], "model_id": model.id, "type": "load_weights"}, JSON

    async def _bring(self, model: Row, before: int) -> _Loaded:
        """The model is in the engine, as it was before the request with this number."""
        if model.id not in self._loaded:
            await self._make_room()
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
            await self._backend.load(model.id, self._root / model.source, model.source_optimizer)
        else:
            await self._backend.create(model.id, LoRA.from_record(model.lora), model.seed)

    async def _do_again(self, model: Row, before: int) -> _Loaded:
        """Its requests since the snapshot. Raises RunError where one that worked now fails."""
        state = _Loaded()
        again = self._database.find(
            requests,
            requests.c.target == model.id,
            requests.c.number > model.snapshot_number,
            requests.c.number < before,
            requests.c.kind.in_(CHANGES),
            requests.c.state.in_(("done", "failed")),
            order=requests.c.number,
        )
        for request in again:
            try:
                await self._apply(model, request, state)
            except ModelsLost:
                raise
            except Exception as error:
                if request.state == "failed":
                    _log.info("request %s failed once more: %s", request.id, error)
                    continue
                raise RunError(
                    f"the model cannot be restored: its {request.kind} {request.id} worked, and now failed: "
                    f"{error}; load a checkpoint into a new model if this stays so"
                ) from error
        return state

    async def _make_room(self) -> None:
        """The model that was used longest ago leaves; one with a gradient only where all have one.

        What it has learned since its snapshot is done once more when it comes back.
        """
        if len(self._loaded) < self._max_models:
            return
        idle = (id for id, state in self._loaded.items() if not state.has_gradient)
        model_id = next(idle, None) or next(iter(self._loaded))
        state = self._loaded[model_id]
        model = self._database.get(models, model_id)
        assert model is not None
        if state.num_steps and not state.has_gradient:
            await self._snapshot(model, self._last_number(model_id), state)
        del self._loaded[model_id]
        await self._backend.remove(model_id)

    def _last_number(self, model_id: str) -> int:
        """Of the newest request that the model in the engine has had."""
        ended = (requests.c.target == model_id, requests.c.state != "waiting")
        found = self._database.find(requests, *ended, order=requests.c.number.desc(), limit=1)
        return found[0].number if found else 0

    async def _snapshot(self, model: Row, number: int, state: _Loaded) -> None:
        """After the request with this number, when there is no gradient."""
        with new_directory(self._root / "models" / directory_name(model.id), str(number)) as directory:
            await self._backend.save(model.id, directory, True)
        before = self._database.get(models, model.id)
        snapshot = str(directory.relative_to(self._root))
        self._database.update(
            models, models.c.id == model.id, snapshot=snapshot, snapshot_number=number, seen=now()
        )
        state.num_steps = 0
        if before is not None and before.snapshot:
            shutil.rmtree(self._root / before.snapshot, ignore_errors=True)
        self._database.update(
            requests,
            requests.c.target == model.id,
            requests.c.number < number,
            requests.c.state != "waiting",
            body=None,
        )

    @property
    def loaded(self) -> Set[str]:
        """The models in the engine."""
        return self._loaded.keys()

    def queue_lengths(self) -> dict[str, int]:
        return {model: len(own) for model, own in self._waiting.items()}
