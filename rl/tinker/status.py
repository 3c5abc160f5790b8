"""The status page: how fast all are served; what of a tenant's own waits, and what went wrong."""

import json
from collections.abc import Iterable
from html import escape

from rl.tinker.service import Service

_STYLE = "body{font:15px sans-serif;margin:2em}td,th{padding:.2em 1em .2em 0;text-align:left}"
_SHOWN_ERRORS = 10


def status_page(service: Service, model_names: tuple[str, ...], tenant: str) -> str:
    """HTML, for one tenant. Of others it shows what all do together: the throughput."""
    training, done, sampled = service.training, service.training.done, service.sampling.tokens
    num_loaded = sum(service.owns_model(tenant, model) for model in training.loaded)
    lengths = training.queue_lengths(tenant).items()
    failed = service.queue.last_failed(tenant, _SHOWN_ERRORS)
    errors = [(row.id, json.loads(row.result)["error"]) for row in failed]
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>rl serve</title>'
        f"<style>{_STYLE}</style><h1>rl serve: {escape(model_names[0])}</h1><p>tenant {escape(tenant)}</p>"
        f"<p id=models>{num_loaded} of your models in the training engine</p>"
        + _table("throughput", ("", "since the start", "a second, of the last minute"), [
            ("training requests", done.total, f"{done.per_second():.2f}"),
            ("sampled tokens", sampled.total, f"{sampled.per_second():.1f}"),
        ])
        + "<h2>Waiting</h2>"
        + f"<p id=waiting>{service.queue.waiting().get(tenant, 0)} of your requests wait</p>"
        + _table("queues", ("model", "requests"), lengths)
        + "<h2>Last errors</h2>"
        + _table("errors", ("request", "error"), errors)
    )  # fmt: skip


def _table(id: str, header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = ["".join(f"<th>{escape(name)}</th>" for name in header)]
    lines += ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    return f"<table id={id}>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
