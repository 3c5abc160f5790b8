"""KubernetesJob: `rl train` in pods of Kubernetes', by a manifest."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl.bounds import NonNegativeInt, PositiveInt
from rl.cluster.group import PATIENCE
from rl.cluster.scheduler import call, train_command
from rl.errors import ConfigError, RunError

_PORT = 29500
_PODS_SECONDS = "3600"  # pods start as nodes come; one that gives up counts as a failure of the job
_LONGEST_NAME = 45  # of 63 characters of a label; the rest is for what tells runs, and pods, from others


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
    """How often the job is started again, from the newest checkpoint, after a pod was lost or the run failed.
    That a setting is wrong is such a failure: `--dry_run` shows it without a pod."""
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
        here = run_dir if run_dir.is_dir() else Path(self.mount)
        is_claim = here.is_dir() and os.access(here, os.W_OK | os.X_OK)  # else another directory of that name
        return run_dir if is_claim else Path("runs", run_dir.name).resolve()

    def command(self, recipe: str, arguments: Sequence[str], run_dir: Path) -> list[str]:
        """What runs in each pod: there `$(NAME)` would be a variable, and `$$` is a dollar."""
        return [word.replace("$", "$$") for word in train_command(self.python, recipe, arguments, run_dir)]

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
                # A loss ends all pods, and the one that comes in the place of the lost.
                "backoffLimit": self.restarts * (self.nodes + 1),
                # The first pod is the run: with it all end, also one that waits for a node.
                "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
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
            return call("kubectl", "create", "-f", str(file))
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


def _label(run_dir: Path) -> str:
    """A name of the run's alone, as Kubernetes takes it, with room for a pod's number behind it."""
    name = re.sub(r"[^a-z0-9]+", "-", f"rl-{run_dir.name}".lower())[:_LONGEST_NAME].strip("-")
    return f"{name}-{hashlib.blake2b(str(run_dir).encode(), digest_size=3).hexdigest()}"
