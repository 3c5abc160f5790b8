"""Jobs: `rl train` on hosts that a scheduler gives, by a script for Slurm or a manifest for Kubernetes.

Neither holds a variable's value but its own: Slurm hands on the environment in which it is submitted, and
Kubernetes reads a Secret by its name.
"""

from dataclasses import dataclass, fields

from rl.cluster.kubernetes_job import KubernetesJob
from rl.cluster.slurm_job import SlurmJob


@dataclass(frozen=True)
class JobConfig:
    """How a run is submitted: `--launcher` names one of these.

    Of each: `file` is what is written into the run's directory and submitted, `logs` how other files begin
    that it, or the scheduler, leaves there; `shares_files` says whether paths of here are paths of its hosts.
    """

    slurm: SlurmJob = SlurmJob()
    kubernetes: KubernetesJob = KubernetesJob()


LAUNCHERS = tuple(field.name for field in fields(JobConfig))
_KINDS = tuple(getattr(JobConfig(), name) for name in LAUNCHERS)
FILES = tuple(name for kind in _KINDS for name in (kind.file, kind.logs))
"""How files begin that are in a run's directory before its job starts."""
