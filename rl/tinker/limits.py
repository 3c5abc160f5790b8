"""What tenants may ask for, and for how long it is kept."""

from dataclasses import dataclass

from rl.bounds import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class Limits:
    """What tenants may ask for, and for how long it is kept."""

    max_rank: PositiveInt = 64
    """Of an adapter."""

    max_models: PositiveInt = 8
    """In the training engine at a time, and adapters in each generator; others wait on disk."""

    max_waiting: PositiveInt = 20_000
    """Requests of one tenant; more are answered 429."""

    max_samples: PositiveInt = 256
    """Of one request."""

    max_waiting_samples: PositiveInt = 100_000
    """Of all requests of one tenant; more are answered 429."""

    shared_samples: PositiveInt | None = None
    """Of one tenant in the generators while others use them, at least; None: 8 to a generator on a CPU, 64 on
    a GPU. Best is the batch whose decoding step takes twice as long as a single sequence's."""

    max_targets: PositiveInt = 128
    """K of target_tokens [N, K]."""

    max_request_tokens: PositiveInt = 2**21
    """Targets of one forward_backward: the sum of N * K."""

    max_request_sequences: PositiveInt = 2**17
    """Of one forward_backward: the sum of K, since each column of targets is trained on as a sequence."""

    max_deaths: PositiveInt = 6
    """Of engines, within an hour, while they worked for one tenant; then it has to wait."""

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
