"""Plans of a run's settings on stand-in hosts, for tests."""

from rl.config import RunConfig
from rl.config.settle import settle
from rl.models.engine_config import EngineConfig
from rl.plan.cluster import Cluster, Host, parse_cluster

AMPLE = Cluster((Host(num_cores=64, free_gib=1000.0),))
"""A host without GPUs on which everything fits."""
HERE = Host(num_cores=2, free_gib=24.0)


def cluster(text: str) -> Cluster:
    """As `rl plan --cluster`."""
    return parse_cluster(text, HERE)


def trainer_config(config: RunConfig) -> EngineConfig:
    """How the trainer computes on a CPU; `eval` needs no teacher's directory."""
    return settle(config, "eval", AMPLE).of("trainer")[0].spec.config
