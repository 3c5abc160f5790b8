"""Sessions with a server: whose failure it is where one breaks."""

import httpx

from rl.envs.chat.episode import ServerLost
from rl.errors import one_line

_SECONDS = 10.0
_OF_A_GATEWAY = (502, 503, 504)
"""What a proxy says of a server that is gone."""


def broken_session(server: str, url: str, error: Exception) -> Exception:
    """What to raise: ServerLost where the server is gone. One that still answers ended this session alone.

    That may be at what the policy wrote. Were its sample dropped, the policy could void its failures.
    """
    try:
        answers = httpx.get(f"{url.rstrip('/')}/health", timeout=_SECONDS).status_code not in _OF_A_GATEWAY
    except httpx.HTTPError:
        answers = False
    if answers:
        return RuntimeError(f"the {server} server {url} ended this episode's session ({one_line(error)})")
    return ServerLost(f"the {server} server {url} is gone ({one_line(error)})")
