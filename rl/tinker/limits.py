"""What tenants may ask for."""

from dataclasses import dataclass

from rl.bounds import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class Limits:
    """What tenants may ask for."""

    max_rank: PositiveInt = 64
    """Of an adapter."""

    max_models: PositiveInt = 8
    """In the training engine at a time, and adapters in each generator; others wait on disk."""

    max_waiting: PositiveInt = 20_000
    """Requests of one tenant; more are answered 429."""

    max_samples: PositiveInt = 256
    """Of one request."""

    keep_seconds: PositiveFloat = 24 * 3600.0
    """For how long results wait to be fetched, and a session's samplers for a heartbeat."""

    snapshot_every: PositiveInt = 10
    """optim_steps of a model, which is how many a restart repeats at most."""
