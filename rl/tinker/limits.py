"""What tenants may ask for, and for how long it is kept."""

from dataclasses import dataclass

from rl.bounds import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class Limits:
    """What tenants may ask for, and for how long it is kept."""

    max_rank: PositiveInt = 32
    """Of an adapter."""

    max_models: PositiveInt = 8
    """In the training engine at a time, and adapters in each generator; others wait on disk."""

    max_waiting: PositiveInt = 20_000
    """Requests of one tenant; more are answered 429."""

    max_samples: PositiveInt = 256
    """Of one request."""

    keep_seconds: PositiveFloat = 24 * 3600.0
    """For how long results wait to be fetched, and a session's samplers for a heartbeat."""

    keep_models_seconds: PositiveFloat = 30 * 24 * 3600.0
    """For how long a model without a request is kept. Checkpoints stay for their ttl, or until deleted."""

    max_disk_gib: PositiveFloat = 100.0
    """Of one tenant: checkpoints, weights of samplers, snapshots, and requests with their results."""

    max_tenant_sessions: PositiveInt = 10_000
    """Of one tenant."""

    max_tenant_models: PositiveInt = 1_000
    """Of one tenant, in the engine or not."""

    max_tenant_samplers: PositiveInt = 100_000
    """Of one tenant."""

    snapshot_every: PositiveInt = 10
    """optim_steps of a model, which is how many a restart repeats at most."""
