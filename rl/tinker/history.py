"""What a model is made of: its requests since its snapshot, in their order."""

from sqlalchemy import select
from sqlalchemy.engine import Row

from rl.tinker.database import Database, requests
from rl.tinker.requests import CHANGES, HEADS


def last_number(database: Database, target: str) -> int:
    """Of a model's newest request that was carried out, whose turn came before all that wait; 0: none was.

    One that was refused may have been so as it came.
    """
    ended = requests.c.target == target, requests.c.state.in_(("done", "failed"))
    newest = select(requests.c.number).where(*ended).order_by(requests.c.number.desc()).limit(1)
    return next((row.number for row in database.rows(newest)), 0)


def last_change(database: Database, request: Row) -> str | None:
    """The kind of the last request before this one that was to change its model, whatever came of it."""
    before = requests.c.target == request.target, requests.c.number < request.number
    changes = select(requests.c.kind).where(*before, requests.c.kind.in_(CHANGES))
    newest = changes.order_by(requests.c.number.desc()).limit(1)
    return next((row.kind for row in database.rows(newest)), None)


def to_repeat(database: Database, model: Row, before: int) -> list[Row]:
    """What makes the model of its snapshot, up to the request with this number; without bodies.

    A gradient that no optim_step used is a part of it, unless a request failed after it.
    """
    where = (
        requests.c.target == model.id,
        requests.c.number > model.snapshot_number,
        requests.c.number < before,
        requests.c.kind.in_(CHANGES),
        requests.c.state.in_(("done", "failed")),
    )
    applied: list[Row] = []
    gradient: list[Row] = []
    for row in database.rows(HEADS.where(*where).order_by(requests.c.number)):
        if row.state == "failed":
            gradient = []
        elif row.kind == "forward_backward":
            gradient.append(row)
        elif row.kind == "optim_step":
            applied += [*gradient, row] if gradient else []  # without one it changed nothing
            gradient = []
        else:  # load_weights: nothing before it matters
            applied, gradient = [row], []
    return applied + gradient
