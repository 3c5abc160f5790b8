"""The routes of training runs and their checkpoints."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel
from sqlalchemy.engine import Row
from tinker.types import CopyWeightsRequest

from rl.tinker.backend import UserError
from rl.tinker.checkpoints import MOST_LISTED
from rl.tinker.database import now
from rl.tinker.paths import KINDS
from rl.tinker.service import Service
from rl.tinker.settings import check_ttl

_MOST = 2**63 - 1


class _Ttl(BaseModel):
    ttl_seconds: int | None = None


class _Path(BaseModel):
    tinker_path: str


def add_checkpoint_routes(api: APIRouter, service: Service, base_model: str) -> None:
    checkpoints = service.checkpoints

    def tenant(request: Request) -> str:
        return request.state.tenant

    @api.get("/training_runs")
    async def training_runs(request: Request, limit: int = 20, offset: int = 0) -> Any:
        limits = page(limit, offset)
        runs = _runs(tenant(request), service.list_models(tenant(request), *limits))
        total = service.count_models(tenant(request))
        return {"training_runs": runs, "cursor": _cursor(*limits, total)}

    @api.get("/training_runs/{id}")
    async def training_run(id: str, request: Request) -> Any:
        (run,) = _runs(tenant(request), [service.training_run(tenant(request), id)])
        return run

    def _runs(tenant: str, rows: Sequence[Row]) -> list[Any]:
        newest = checkpoints.newest(tenant, [row.id for row in rows])
        return [_run(row, {kind: newest.get((row.id, kind)) for kind in KINDS}) for row in rows]

    def _run(row: Row, newest: Mapping[str, Row | None]) -> Any:
        last = {
            kind: None if checkpoint is None else _checkpoint(checkpoint)
            for kind, checkpoint in newest.items()
        }
        return {
            "training_run_id": row.id,
            "base_model": base_model,
            "model_owner": row.tenant,
            "is_lora": True,
            "lora_rank": row.lora["rank"],
            "last_request_time": _time(max(row.seen, row.created)),
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": row.user_metadata,
        }

    @api.get("/training_runs/{id}/checkpoints")
    async def checkpoints_of(id: str, request: Request) -> Any:
        service.training_run(tenant(request), id)
        return {"checkpoints": [_checkpoint(row) for row in checkpoints.list(tenant(request), id)]}

    @api.get("/checkpoints")
    async def all_checkpoints(request: Request, limit: int = 100, offset: int = 0) -> Any:
        limits = page(limit, offset)
        rows = [_checkpoint(row) for row in checkpoints.list(tenant(request), None, *limits)]
        return {"checkpoints": rows, "cursor": _cursor(*limits, checkpoints.count(tenant(request)))}

    @api.post("/weights_info")
    async def weights_info(body: _Path, request: Request) -> Any:
        lora = checkpoints.readable(tenant(request), body.tinker_path).lora
        return {
            "base_model": base_model,
            "is_lora": True,
            "lora_rank": lora["rank"],
            "train_unembed": False,
            "train_mlp": "up_proj" in lora["targets"],
            "train_attn": "q_proj" in lora["targets"],
        }

    @api.post("/copy_weights")
    async def copy_weights(body: CopyWeightsRequest, request: Request) -> Any:
        if body.session_id is None or body.model_seq_id is None:
            raise UserError("copy_weights needs session_id and model_seq_id; there are no projects here")
        return {
            "tinker_path": await service.copy_weights(
                tenant(request), body.session_id, body.model_seq_id, body.source_path, body.ttl_seconds
            )
        }

    route = "/training_runs/{id}/checkpoints/{kind}/{name}"

    @api.delete(route)
    async def delete(id: str, kind: str, name: str, request: Request) -> Response:
        await checkpoints.delete(checkpoints.own(tenant(request), id, kind, name))
        return Response(status_code=204)

    @api.put(f"{route}/ttl")
    async def set_ttl(id: str, kind: str, name: str, body: _Ttl, request: Request) -> Response:
        check_ttl(body.ttl_seconds)
        expires = None if body.ttl_seconds is None else now() + body.ttl_seconds
        checkpoints.change(checkpoints.own(tenant(request), id, kind, name), expires=expires)
        return Response(status_code=204)

    @api.api_route(f"{route}/publish", methods=["POST", "DELETE"])
    async def publish(id: str, kind: str, name: str, request: Request) -> Response:
        public = request.method == "POST"
        checkpoints.change(checkpoints.own(tenant(request), id, kind, name), public=public)
        return Response(status_code=204)


def _checkpoint(row: Row) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": KINDS[row.kind],
        "time": _time(row.created),
        "tinker_path": row.path,
        "size_bytes": row.num_bytes,
        "public": row.public,
        "expires_at": None if row.expires is None else _time(row.expires),
        "user_metadata": row.user_metadata,
    }


def page(limit: int, offset: int) -> tuple[int, int]:
    """Limit and offset within what is answered at once."""
    return max(0, min(limit, MOST_LISTED)), max(0, min(offset, _MOST))


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"limit": limit, "offset": offset, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(min(seconds, 253_402_300_799), UTC).isoformat()
