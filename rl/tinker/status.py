"""The status page: who is served, what waits, what went wrong."""

import json
from html import escape

from rl.tinker.service import Service

_STYLE = "body{font:15px sans-serif;margin:2em}td,th{padding:.2em 1em .2em 0;text-align:left}"


def status_page(service: Service, model_names: tuple[str, ...]) -> str:
    """HTML. Tenants are shown by what their key is known as here, never by the key."""
    now = service.status()
    queues = "".join(f"<tr><td>{escape(id)}</td><td>{n}</td></tr>" for id, n in now.queues.items())
    tenants = "".join(f"<tr><td>{escape(t)}</td><td>{n}</td></tr>" for t, n in now.tenants.items())
    errors = "".join(
        f"<tr><td>{escape(id)}</td><td>{escape(_said(said))}</td></tr>" for id, said in now.errors
    )
    return (
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>rl serve</title>'
        f"<style>{_STYLE}</style><h1>rl serve: {escape(model_names[0])}</h1>"
        f"<p>{now.num_models} models in the training engine; {now.num_done} training requests and "
        f"{now.num_tokens} sampled tokens since it started</p>"
        f"<h2>Waiting</h2><table id=queues><tr><th>model</th><th>requests</th></tr>{queues}</table>"
        f"<h2>Tenants</h2><table id=tenants><tr><th>tenant</th><th>waiting</th></tr>{tenants}</table>"
        f"<h2>Last errors</h2><table id=errors><tr><th>request</th><th>error</th></tr>{errors}</table>"
    )


def _said(result: bytes) -> str:
    return json.loads(result)["error"]
