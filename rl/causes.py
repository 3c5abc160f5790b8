"""The table of causes: whose failure each is, and what comes of its sample.

A cause that the policy can bring about is always its score: the reward is 0 and the sample is learned from.
Otherwise a policy could void its failures. Only the infrastructure's failures are dropped.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_POLICY = {
    "raised": "the agent, step() or the reward raised at what the policy wrote",
    "type": "step() or the reward returned what it must not",
    "timeout": "a tool, step(), the agent, the reward or the whole episode took too long",
    "crashed": "a tool, step(), the agent or the reward ended its process",
    "memory": "step(), the agent or the reward ran out of memory",
    "template": "the chat template does not take what follows the policy's words",
}
_INFRASTRUCTURE = {
    "start": "the episode failed before the policy's first turn",
    "too_long": "the first prompt leaves no room for an answer",
    "server": "a server that the environment needs is gone",
    "sandbox": "this machine cannot isolate code",
    "judge": "the judge does not answer",
    "lost": "the episode's worker, or its generator, died several times",
}
CAUSES: Mapping[str, str] = _POLICY | _INFRASTRUCTURE
"""Name -> when it happens."""


def is_policys(cause: str) -> bool:
    """Whether the policy can bring it about. False of a cause that the table lacks."""
    return cause in _POLICY


_outages: ContextVar[list[str] | None] = ContextVar("outages", default=None)


@contextmanager
def noting_outages(outages: list[str]) -> Iterator[None]:
    """Processes that die while the body waits for them are added to the list."""
    token = _outages.set(outages)
    try:
        yield
    finally:
        _outages.reset(token)


def note_outage(why: str) -> None:
    """Adds to the list of the `noting_outages` around it, where there is one."""
    if (outages := _outages.get()) is not None:
        outages.append(why)
