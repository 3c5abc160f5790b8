"""Jobs: `rl train` on hosts that a scheduler gives, by a script for Slurm or a manifest for Kubernetes.

Neither holds a variable's value but its own: Slurm hands on the environment in which it is submitted, and
Kubernetes reads a Secret by its name.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from rl.bounds import NonNegativeInt, PositiveInt
from rl.cluster.rendezvous import PATIENCE
from rl.cluster.slurm_time import seconds_of
from rl.errors import ConfigError, RunError

_SUBMIT_SECONDS = 60.0
_TERMINATED = 128 + 15  # what `rl train` ends with where a signal had it save a checkpoint and end
_PORT = 29500
_PODS_SECONDS = "3600"  # pods start as nodes come; one that gives up counts as a failure of the job
_LONGEST_NAME = 45  # of 63 characters of a label; the rest is for what tells runs, and pods, from others


@dataclass(frozen=True)
class SlurmJob:
    """An allocation of Slurm's, with a process of `rl train` on each node."""

    nodes: PositiveInt = 1
    """Hosts of the run."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each; 0 asks for none."""
    cpus_per_node: NonNegativeInt = 0
    """Cores of each; 0 takes whole nodes."""
    partition: str = ""
    account: str = ""
    time: str = ""
    """The longest it may run, as 12:00:00; empty: the partition's."""
    signal_seconds: PositiveInt = 120
    """So long before its end the run is told to save a checkpoint; then the job is queued again."""
    setup: tuple[str, ...] = ()
    """Lines of the script that come before, as "module load cuda"."""
    options: tuple[str, ...] = ()
    """More options of sbatch, without their dashes, as qos=high."""

    file: ClassVar[str] = "slurm.sh"
    logs: ClassVar[str] = "slurm-"
    shares_files: ClassVar[bool] = True

    def run_dir(self, asked: str, name: str) -> Path:
        """asked: --run_dir, or empty. name: of a new run."""
        return Path(asked or f"runs/{name}").resolve()

    def place(self, run_dir: Path) -> Path:
        """The directory of what is submitted."""
        return run_dir

    def command(self, recipe: str, arguments: Sequence[str], run_dir: Path) -> list[str]:
        """What runs on each node."""
        return _train(sys.executable, recipe, arguments, run_dir)

    def text(self, run_dir: Path, command: Sequence[str]) -> str:
        """The script. command: what runs on each node. Raises ConfigError."""
        if (seconds := seconds_of(self.time)) is not None and seconds <= self.signal_seconds:
            raise ConfigError(
                f"slurm.time={self.time} is not over slurm.signal_seconds={self.signal_seconds}, so that the "
                f"run would be told to end as it starts, again and again; raise it"
            )
        options = {
            "job-name": f"rl-{run_dir.name}",
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": self.gpus_per_node or "",
            "cpus-per-task": self.cpus_per_node or "",
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "signal": f"TERM@{self.signal_seconds}",
            "output": f"{run_dir}/slurm-".replace("%", "%%") + "%j.log",
            "open-mode": "append",
        }
        lines = [
            f"#SBATCH --{option}={shlex.quote(str(value))}" for option, value in options.items() if value
        ]
        lines += ["#SBATCH --requeue", *(["#SBATCH --exclusive"] * (not self.cpus_per_node))]
        lines += [f"#SBATCH --{option}" for option in self.options]
        cores = f" --cpus-per-task={self.cpus_per_node}" if self.cpus_per_node else ""
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                "",
                f"cd {shlex.quote(str(Path.cwd()))}",
                *self.setup,
                "# Told to end, the run saves a checkpoint; it goes on from there when its turn comes again.",
                f"srun --mpi=none --cpu-bind=none --kill-on-bad-exit=0{cores} {shlex.join(command)}",
                "code=$?",
                f'if [ "$code" -eq {_TERMINATED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
                'exit "$code"',
                "",
            ]
        )

    def submit(self, file: Path) -> str:
        """What Slurm answers. Raises RunError."""
        return _run("sbatch", str(file))


@dataclass(frozen=True)
class KubernetesJob:
    """An Indexed Job, with a pod of `rl train` on each host, and a Service by which they meet."""

    nodes: PositiveInt = 1
    """Hosts of the run."""
    image: str = ""
    """In which rl is installed."""
    python: str = "python"
    """The image's Python that has rl."""
    directory: str = ""
    """Of the image, from which relative paths lead, as of a recipe's file; empty: the image's own."""
    namespace: str = "default"
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each pod."""
    cpus_per_node: NonNegativeInt = 0
    """Cores of each pod; 0 asks for none."""
    memory_gib: NonNegativeInt = 0
    """Memory of each pod; 0 asks for none."""
    shared_memory_gib: PositiveInt = 16
    """Of /dev/shm, through which weights go: three versions of them."""
    claim: str = ""
    """A PersistentVolumeClaim that all pods may write to, for the run's directory."""
    mount: str = "/runs"
    """Where it is mounted."""
    secret: str = ""
    """A Secret whose keys become variables of the processes, as HF_TOKEN."""
    restarts: NonNegativeInt = 10
    """How often the job is started again after a pod was lost; it goes on from the newest checkpoint."""
    signal_seconds: PositiveInt = 120
    """So long a pod that is told to end may take to save a checkpoint."""

    file: ClassVar[str] = "kubernetes.yaml"
    logs: ClassVar[str] = "kubernetes."
    shares_files: ClassVar[bool] = False

    def run_dir(self, asked: str, name: str) -> Path:
        """asked: --run_dir, or empty. name: of a new run.

        Raises ConfigError where it is not on the claim: a pod's own disk goes with it.
        """
        mount = Path(self.mount)
        run_dir = Path(os.path.normpath(asked or mount / name))
        if mount not in run_dir.parents:
            raise ConfigError(
                f"run_dir={asked!r} is not below --kubernetes.mount {self.mount}, where the pods have the "
                f"claim; give {mount / run_dir.name}"
            )
        return run_dir

    def place(self, run_dir: Path) -> Path:
        """The directory of what is submitted: the run's, where the claim is mounted here, too."""
        return run_dir if Path(self.mount).is_dir() else Path("runs", run_dir.name).resolve()

    def command(self, recipe: str, arguments: Sequence[str], run_dir: Path) -> list[str]:
        """What runs in each pod: there `$(NAME)` would be a variable, and `$$` is a dollar."""
        return [word.replace("$", "$$") for word in _train(self.python, recipe, arguments, run_dir)]

    def text(self, run_dir: Path, command: Sequence[str]) -> str:
        """Two documents of YAML, written as JSON. The Job has its run's name: no other may have it in its
        namespace. Raises ConfigError where something is missing."""
        if missing := [setting for setting in ("image", "claim") if not getattr(self, setting)]:
            raise ConfigError("\n".join(f"--kubernetes.{setting} is missing; give it" for setting in missing))
        service, metadata = _label(run_dir), {"namespace": self.namespace}
        resources = {
            name: str(value)
            for name, value in {
                "nvidia.com/gpu": self.gpus_per_node,
                "cpu": self.cpus_per_node,
                "memory": f"{self.memory_gib}Gi" if self.memory_gib else 0,
            }.items()
            if value
        }
        rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
        container = {
            "name": "rl",
            "image": self.image,
            "command": list(command),
            **({"workingDir": self.directory} if self.directory else {}),
            "env": [
                {"name": "RANK", "valueFrom": rank},
                {"name": "WORLD_SIZE", "value": str(self.nodes)},
                {"name": "MASTER_ADDR", "value": f"{service}-0.{service}"},
                {"name": "MASTER_PORT", "value": str(_PORT)},
                {"name": PATIENCE, "value": _PODS_SECONDS},
            ],
            "envFrom": [{"secretRef": {"name": self.secret}}] if self.secret else [],
            "resources": {"limits": resources, "requests": resources},
            "volumeMounts": [
                {"name": "shared-memory", "mountPath": "/dev/shm"},
                {"name": "runs", "mountPath": self.mount},
            ],
        }
        size = f"{self.shared_memory_gib}Gi"
        pod = {
            "subdomain": service,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.signal_seconds,
            "containers": [container],
            "volumes": [
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
                {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}},
            ],
        }  # fmt: skip
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": service, **metadata},
            "spec": {
                "completionMode": "Indexed",
                "completions": self.nodes,
                "parallelism": self.nodes,
                "backoffLimit": self.restarts * self.nodes,
                "template": {"metadata": {"labels": {"rl-run": service}}, "spec": pod},
            },
        }
        headless = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": service, **metadata},
            "spec": {"clusterIP": "None", "selector": {"rl-run": service}, "publishNotReadyAddresses": True},
        }
        # A file that begins with a brace is JSON for kubectl before 1.33, which reads one document of it.
        return "".join(f"---\n{json.dumps(document, indent=1)}\n" for document in (headless, job))

    def submit(self, file: Path) -> str:
        """What kubectl answers. Raises RunError.

        An earlier submission that is still there is an error: applied once more, it would start nothing.
        """
        try:
            return _run("kubectl", "create", "-f", str(file))
        except RunError as error:
            exist = re.findall(r'(jobs|services)\S* "\S+" already exists', str(error))
            if "jobs" in exist:
                end = f"kubectl delete --cascade=foreground -f {file}"
                raise RunError(
                    f"this run was submitted before, and its Job is still there (kubectl get -f {file}); to "
                    f"go on from the newest checkpoint, end it with {end}, and submit again"
                ) from error
            if exist and str(error).count("Error from server") == 1:
                return "the Job was created; its Service was there"
            raise


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


def _train(python: str, recipe: str, arguments: Sequence[str], run_dir: Path) -> list[str]:
    """What runs on each host: it begins, or goes on."""
    words = [python, "-m", "rl", "train", recipe, *arguments]
    return [*words, "--run_dir", str(run_dir), "--resume", "latest"]


def _label(run_dir: Path) -> str:
    """A name of the run's alone, as Kubernetes takes it, with room for a pod's number behind it."""
    name = re.sub(r"[^a-z0-9]+", "-", f"rl-{run_dir.name}".lower())[:_LONGEST_NAME].strip("-")
    return f"{name}-{hashlib.blake2b(str(run_dir).encode(), digest_size=3).hexdigest()}"


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_SUBMIT_SECONDS
        )  # fmt: skip
    except FileNotFoundError:
        raise RunError(f"{command[0]} is not here; submit {command[-1]} where it is") from None
    except (OSError, subprocess.SubprocessError) as error:
        cause = "; ".join((getattr(error, "stderr", "") or str(error)).strip().splitlines())
        raise RunError(f"{command[0]} failed: {cause}; what it was given is {command[-1]}") from error
    return done.stdout.strip()
