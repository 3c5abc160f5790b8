"""Where a run's metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow."""

import contextlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Name = Literal["tensorboard", "wandb", "mlflow"]
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}


@dataclass(frozen=True)
class TrackingConfig:
    """Who is told of the metrics of each step, beside metrics.jsonl."""

    sinks: tuple[Name, ...] = ("tensorboard",)
    """tensorboard: files in the run's directory. wandb, mlflow: what their own environment variables say
    (WANDB_MODE=offline, WANDB_API_KEY, MLFLOW_TRACKING_URI, ...)."""
    project: str = "rl"
    """W&B's project, MLflow's experiment."""

    def validate(self) -> list[str]:
        """One line for each problem."""
        missing = [name for name in self.sinks if importlib.util.find_spec(name) is None]
        found = [
            f"tracking.sinks names {name}, which is not installed; run: pip install {_PACKAGES[name]}"
            for name in missing
        ]
        if self.project != TrackingConfig.project and not {"wandb", "mlflow"} & set(self.sinks):
            found.append(
                f"tracking.project={self.project} has no effect without wandb or mlflow in tracking.sinks; "
                f"add one"
            )
        return found


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self, failed: bool) -> None: ...


def open_sinks(tracking: TrackingConfig, run_dir: Path, settings: Mapping[str, Any]) -> "Sinks":
    """settings: the run's config, plain data."""
    makers = {
        "tensorboard": lambda: TensorBoard(run_dir),
        "wandb": lambda: WandB(tracking.project, run_dir, settings),
        "mlflow": lambda: MLflow(tracking.project, run_dir, settings),
    }
    return Sinks([(name, makers[name]()) for name in tracking.sinks])


class Sinks:
    """All of them. One that fails is named once, and left out from then on: it must not end a run."""

    def __init__(self, sinks: Sequence[tuple[str, Sink]]):
        self._sinks = dict(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> str:
        """Returns words about a sink that failed, or nothing."""
        said = ""
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(step, metrics)
            except Exception as error:  # of another's library: a network, a disk
                del self._sinks[name]
                said = f"{name} gets no more metrics: {' '.join(str(error).split()):.200}"
        return said

    def close(self, failed: bool) -> None:
        for sink in self._sinks.values():
            with contextlib.suppress(Exception):
                sink.close(failed)


class TensorBoard:
    def __init__(self, run_dir: Path):
        from torch.utils.tensorboard import SummaryWriter  # 1 s to import

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandB:
    """An evaluation beside training may come after a later step, so steps are a metric of ours."""

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]):
        import wandb

        self._run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir), config=dict(settings))
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **_finite(metrics)})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]):
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(project)
        mlflow.start_run(run_name=run_dir.name)
        mlflow.log_params({name: str(value)[:500] for name, value in _flat(settings).items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(_finite(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """ "section.field" -> value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
