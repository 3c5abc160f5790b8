"""The trackers that a run tells of its metrics, by their own libraries. Each is used from one thread.

A run that goes on in its directory goes on in its trackers too. TensorBoard forgets steps that happen again.
W&B and MLflow cannot: a metric of a step that they have already is not sent a second time.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rl.errors import RunError
from rl.paths import write_whole

_PROJECT = "rl"
_FINISH_SECONDS = 50.0  # below the deadline of Sinks.close, so that W&B itself says what is left


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def rewind(self, step: int) -> None:
        """Steps after `step` happen again."""

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    def __init__(self, run_dir: Path):
        from torch.utils.tensorboard import SummaryWriter  # 1 s to import

        self._directory = str(run_dir / "tensorboard")
        self._new_writer = SummaryWriter
        self._writer = SummaryWriter(self._directory)
        self._warmup: Any = None  # a curve of its own, with steps of its own
        self._warms_up_again = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer_of(name).add_scalar(name, value, step)

    def _writer_of(self, name: str) -> Any:
        if not name.startswith("warmup/"):
            return self._writer
        if self._warmup is None:
            again = {"purge_step": 1} if self._warms_up_again else {}
            self._warmup = self._new_writer(f"{self._directory}/warmup", **again)
        return self._warmup

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._new_writer(self._directory, purge_step=step + 1)
        if step <= 0:
            self._warms_up_again = True
            if self._warmup is not None:
                self._warmup.close()
                self._warmup = None

    def close(self, failed: bool) -> None:
        self._writer.close()
        if self._warmup is not None:
            self._warmup.close()


class RemoteRun:
    """tracking/NAME.json of a run's directory: the tracker's id of the run, and each metric's last step."""

    def __init__(self, run_dir: Path, name: str):
        """Raises RunError where the file is broken."""
        self._path = run_dir / "tracking" / f"{name}.json"
        self.id = ""  # until it has begun
        self._steps: dict[str, int] = {}
        if not self._path.exists():
            return
        try:
            record = json.loads(self._path.read_text())
            self.id, self._steps = str(record["id"]), dict(record["steps"])
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"{self._path} is broken ({error}); remove it to begin another run") from error

    def begin(self, run_id: str) -> None:
        self.id = run_id
        self._write()

    def new(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Of the finite metrics, those that the tracker does not have of this step."""
        return {
            name: float(value)
            for name, value in metrics.items()
            if math.isfinite(value) and step > self._steps.get(name, -1)
        }

    def sent(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps.update(dict.fromkeys(metrics, step))
        self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps({"id": self.id, "steps": self._steps}).encode())


class WandB:
    """An evaluation beside training may come after a later step, so steps are a metric of ours."""

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]):
        import wandb

        self._remote = RemoteRun(run_dir, "wandb")
        again = {"id": self._remote.id, "resume": "allow"} if self._remote.id else {}
        limit = {} if "WANDB_FINISH_TIMEOUT" in os.environ else {"finish_timeout": _FINISH_SECONDS}
        self._run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", run_dir.name),
            dir=os.environ.get("WANDB_DIR", str(run_dir)),
            config=dict(settings),
            settings=wandb.Settings(**limit),
            **again,
        )
        self._run.define_metric("*", step_metric="step")
        self._remote.begin(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if new := self._remote.new(step, metrics):
            self._run.log({"step": step, **new})
            self._remote.sent(step, new)

    def rewind(self, step: int) -> None:
        pass

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]):
        import mlflow

        self._mlflow = mlflow
        self._remote = RemoteRun(run_dir, "mlflow")
        if self._remote.id:
            mlflow.start_run(run_id=self._remote.id)
            return
        mlflow.set_experiment(project or os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
        run = mlflow.start_run(run_name=run_dir.name)
        mlflow.log_params({name: str(value)[:500] for name, value in _flat(settings).items()})
        self._remote.begin(run.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if new := self._remote.new(step, metrics):
            self._mlflow.log_metrics({_mlflow_name(name): value for name, value in new.items()}, step=step)
            self._remote.sent(step, new)

    def rewind(self, step: int) -> None:
        pass

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """In characters that MLflow takes, and two parts at most: in its files "a/b/c" cannot be beside "a/b"."""
    group, slash, rest = name.partition("/")
    return re.sub(r"[^\w .:/-]", "_", group + slash + rest.replace("/", "."))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """ "section.field" -> value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
