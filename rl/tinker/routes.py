"""The routes of Tinker's REST API. Requests are read by the SDK's own types: they are what it sends."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from tinker import types

from rl.tinker import wire
from rl.tinker.backend import NotFound, UserError
from rl.tinker.checkpoint_routes import add_checkpoint_routes, page
from rl.tinker.downloads import add_download_routes
from rl.tinker.encryption import check_recipients
from rl.tinker.service import Service
from rl.tinker.status import status_page
from rl.tinker.wire_limits import WireLimits

_POLL_SECONDS = 20.0  # the SDK gives up a poll after 45
_SEQ_IDS_PER_CLONE = 1_000_000_000  # of a SamplingClient that was copied
NOT_OFFERED = (
    "create_custom_loss",
    "auth/token",
    "billing/usage/events",
    "billing/usage/checkpoints/current",
    "audit",
    "sessions/search",
    "sessions/{id}/project",
)


@dataclass(frozen=True)
class Served:
    """What the server says of itself."""

    model_names: tuple[str, ...]
    tokenizer_id: str | None
    architecture: str
    context_length: int


class _Cancel(BaseModel):
    request_id: str


class _Finish(BaseModel):
    reason: Any = None
    detail: str | None = None


class _Any(BaseModel):
    model_config = {"extra": "allow"}


def add_routes(
    app: FastAPI, service: Service, served: Served, read_body: Callable[[Request], Awaitable[bytes]]
) -> None:
    api = APIRouter(prefix="/api/v1")
    limits = service.limits
    wire_limits = WireLimits(limits.max_request_tokens, limits.max_targets, limits.max_request_sequences)

    def tenant(request: Request) -> str:
        return request.state.tenant

    # ---- the server

    @api.get("/healthz")
    async def healthz() -> Any:
        return {"status": "ok"}

    @api.post("/client/config")
    async def client_config(_body: _Any) -> Any:
        return {}

    @api.post("/client/dynamic_config")
    async def dynamic_config(_body: _Any) -> Any:
        return {"sample_cancel_enabled": True}

    @api.post("/telemetry")
    async def telemetry(_body: _Any) -> Any:
        return {"status": "accepted"}  # and thrown away

    @api.get("/get_server_capabilities")
    async def capabilities() -> Any:
        length = served.context_length
        model = {"max_context_length": length, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **model} for name in served.model_names]}

    # ---- sessions

    @api.post("/create_session")
    async def create_session(body: types.CreateSessionRequest, request: Request) -> Any:
        if body.project_id is not None:
            raise UserError("projects are not offered here; leave project_id out")
        id = service.create_session(tenant(request), body.display_name, body.user_metadata)
        message = "train_unembed has no effect on this server: adapters leave the unembedding as it is"
        return {"type": "create_session", "session_id": id, "info_message": message}

    @api.post("/session_heartbeat")
    async def heartbeat(body: types.SessionHeartbeatRequest, request: Request) -> Any:
        service.heartbeat(tenant(request), body.session_id)
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{id}/finish")
    async def finish(id: str, _body: _Finish, request: Request) -> Response:
        await service.finish_session(tenant(request), id)
        return Response(status_code=204)

    @api.get("/sessions")
    async def sessions(request: Request, limit: int = 20, offset: int = 0) -> Any:
        rows = service.list_sessions(tenant(request), *page(limit, offset))
        return {"sessions": [row.id for row in rows]}

    @api.get("/sessions/{id}")
    async def session(id: str, request: Request) -> Any:
        row = service.session(tenant(request), id)
        return {
            "training_run_ids": [run.id for run in service.models_of(row)],
            "sampler_ids": [sampler.id for sampler in service.list_samplers(id)],
            "user_metadata": row.user_metadata,
            "display_name": row.display_name,
        }

    # ---- training

    @api.post("/create_model")
    async def create_model(body: types.CreateModelRequest, request: Request) -> Any:
        _check_adamw(body.optimizer_config)
        asked = body.model_dump(mode="json")
        id = service.create_model(tenant(request), body.session_id, body.model_seq_id, body.base_model, asked)
        return _future(id, id.rpartition(":")[0])

    @api.post("/get_info")
    async def get_info(body: types.GetInfoRequest, request: Request) -> Any:
        model = service.model(tenant(request), body.model_id)
        name = served.model_names[0]
        data = {"model_name": name, "tokenizer_id": served.tokenizer_id, "arch": served.architecture}
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": data,
            "model_name": name,
            "is_lora": True,
            "lora_rank": model.lora["rank"],
        }

    @api.post("/forward_backward")
    async def forward_backward(request: Request) -> Any:
        body = await read_body(request)
        kind, model, seq_id = wire.head_of(body, wire_limits)
        return _future(service.submit(tenant(request), kind, model, seq_id, body), model)

    @api.post("/optim_step")
    async def optim_step(body: types.OptimStepRequest, request: Request) -> Any:
        params = body.optim_params
        if not isinstance(params, types.AdamParams):
            raise UserError("only Adam is offered here; send AdamParams")
        id = service.optim_step(tenant(request), body.model_id, body.seq_id or 0, params.model_dump())
        return _future(id, body.model_id)

    @api.post("/save_weights")
    async def save_weights(body: types.SaveWeightsRequest, request: Request) -> Any:
        return _save("save_weights", body, request)

    @api.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: types.SaveWeightsForSamplerRequest, request: Request) -> Any:
        return _save("save_weights_for_sampler", body, request)

    @api.post("/save_weights_external")
    async def save_weights_external(body: types.SaveWeightsExternalRequest, request: Request) -> Any:
        check_recipients(body.age_encryption_recipients or ())
        return _save("save_weights_external", body, request)

    def _save(kind: str, body: Any, request: Request) -> Any:
        id = service.save(
            tenant(request), kind, body.model_id, body.seq_id or 0, body.model_dump(mode="json")
        )
        return _future(id, body.model_id)

    @api.post("/load_weights")
    async def load_weights(body: types.LoadWeightsRequest, request: Request) -> Any:
        if body.optimizer_config is not None:
            _check_adamw(body.optimizer_config)
        if body.session_id is not None and body.model_seq_id is not None:
            asked = body.model_dump(mode="json", exclude={"weights_access_token"})
            id = service.create_model_from(
                tenant(request), body.session_id, body.model_seq_id, body.path, body.optimizer, asked
            )
            return _future(id, id.rpartition(":")[0])
        if body.model_id is None:
            raise UserError("load_weights needs model_id, or session_id with model_seq_id")
        id = service.load_weights(tenant(request), body.model_id, body.seq_id or 0, body.path, body.optimizer)
        return _future(id, body.model_id)

    # ---- sampling

    @api.post("/create_sampling_session")
    async def create_sampling_session(body: types.CreateSamplingSessionRequest, request: Request) -> Any:
        number = body.sampling_session_seq_id
        id = service.create_sampler(
            tenant(request), body.session_id, number, body.base_model, body.model_path
        )
        return {"type": "create_sampling_session", "sampling_session_id": id}

    @api.get("/samplers/{id}")
    async def sampler(id: str, request: Request) -> Any:
        row = service.sampler(tenant(request), id)
        return {"sampler_id": row.id, "base_model": served.model_names[0], "model_path": row.model_path}

    @api.post("/asample")
    async def asample(body: types.SampleRequest, request: Request) -> Any:
        if body.sampling_session_id is None or body.seq_id is None:
            raise UserError("asample needs sampling_session_id and seq_id; create a sampling session first")
        asked = body.model_dump(mode="json")
        id = service.sample(tenant(request), body.sampling_session_id, body.seq_id, asked)
        ids = [f"{id}:{i}" for i in range(body.num_samples)]
        return {**_future(id), "sample_sequence_ids": ids}

    # ---- futures

    @api.post("/retrieve_future")
    async def retrieve_future(body: types.FutureRetrieveRequest, request: Request) -> Response:
        row = await service.queue.wait(body.request_id, tenant(request), _POLL_SECONDS)
        if row is None:
            raise NotFound(f"there is no request {body.request_id[:200]}")
        if row.state == "waiting":
            again = {"type": "try_again", "request_id": row.id, "queue_state": "active"}
            return JSONResponse(again)
        return Response(row.result, media_type=row.media_type)

    @api.post("/retrieve_futures")
    async def retrieve_futures(body: types.FuturesRetrieveRequest, request: Request) -> Any:
        """What of a sampling session has ended since the cursor."""
        id, clone = body.target.sampling_session_id, body.target.cloned_sampler_id
        service.sampler(tenant(request), id)
        seconds = _POLL_SECONDS if body.timeout is None else max(0.0, min(body.timeout, _POLL_SECONDS))
        cursor = min(max(0, body.prev_cursor), 2**62)
        ended = await service.queue.ended_after(id, cursor, seconds)
        completions = [
            {"state": "finished", "request_id": row.id, "response_payload_uncompressed_size": row.size}
            if row.state == "done"
            else {"state": "failed", "request_id": row.id}
            for _, row in ended
            if int(row.id.rpartition(":")[2]) // _SEQ_IDS_PER_CLONE == clone
        ]
        return {"completions": completions, "cursor": ended[-1][0] if ended else cursor}

    @api.post("/cancel_future")
    async def cancel_future(body: _Cancel, request: Request) -> Response:
        service.cancel(tenant(request), body.request_id)
        return Response(status_code=204)

    # ---- the rest

    async def not_offered(request: Request) -> Response:
        raise UserError(f"{request.url.path} is not offered by this server")

    for path in NOT_OFFERED:
        api.add_api_route(f"/{path}", not_offered, methods=["GET", "POST", "PUT"])
    add_checkpoint_routes(api, service, served.model_names[0])
    add_download_routes(api, service.checkpoints)
    app.include_router(api)

    @app.get("/")
    async def status(request: Request) -> Response:
        page = status_page(service, served.model_names, tenant(request))
        return Response(page, media_type="text/html")


def _check_adamw(optimizer: Any) -> None:
    """optimizer: one of the SDK's configurations."""
    if optimizer.type != "adamw":
        raise UserError(f"the optimizer {optimizer.type!r} is not offered here; use adamw")


def _future(id: str, model: str | None = None) -> dict[str, Any]:
    return {"request_id": id, "model_id": model} if model else {"request_id": id}
