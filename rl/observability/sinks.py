"""Where a run's metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow."""

import asyncio
import configparser
import contextlib
import importlib.util
import netrc
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rl.errors import RunError, message_of, one_line
from rl.observability.trackers import MLflow, Sink, TensorBoard, WandB
from rl.observability.writer import Writer

Name = Literal["tensorboard", "wandb", "mlflow"]
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_WITHOUT_A_SERVER = ("offline", "disabled", "dryrun")  # W&B's modes


@dataclass(frozen=True)
class TrackingConfig:
    """Who is told of the metrics of each step, beside metrics.jsonl."""

    sinks: tuple[Name, ...] = ("tensorboard",)
    """tensorboard: files in the run's directory. wandb, mlflow: what their own environment variables say
    (WANDB_MODE=offline, WANDB_API_KEY, MLFLOW_TRACKING_URI, ...)."""
    project: str = ""
    """W&B's project, MLflow's experiment. Empty: by WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME, else rl."""

    def validate(self) -> list[str]:
        """One line for each problem."""
        if twice := sorted({name for name in self.sinks if self.sinks.count(name) > 1}):
            return [f"tracking.sinks={self.sinks} names {twice[0]} twice; name each once"]
        missing = [name for name in self.sinks if importlib.util.find_spec(name) is None]
        problems = [
            f"tracking.sinks names {name}, which is not installed; run: pip install {_PACKAGES[name]}"
            for name in missing
        ]
        if self.project != TrackingConfig.project and not {"wandb", "mlflow"} & set(self.sinks):
            problems.append(
                f"tracking.project={self.project} has no effect without wandb or mlflow in tracking.sinks; "
                f"add one"
            )
        if "wandb" in self.sinks and not missing and _lacks_wandb_key():
            problems.append(
                "tracking.sinks names wandb, which has no key here; set WANDB_API_KEY, run wandb login, "
                "or set WANDB_MODE=offline"
            )
        return problems


def _lacks_wandb_key() -> bool:
    """Whether W&B would ask for a key, or fail for want of one, after processes have started."""
    has_key = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    if has_key or os.environ.get("WANDB_MODE") in _WITHOUT_A_SERVER:
        return False
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return False
    settings = _wandb_settings()
    if "WANDB_MODE" not in os.environ and settings.get("mode") in _WITHOUT_A_SERVER:
        return False
    url = urlsplit(os.environ.get("WANDB_BASE_URL") or settings.get("base_url", "https://api.wandb.ai"))
    try:  # with a path, whose permissions nobody checks: as W&B does
        logins = netrc.netrc(_netrc_path())
    except (OSError, netrc.NetrcParseError):
        return True
    return not any(logins.authenticators(name) for name in (url.netloc, url.hostname or ""))


def _netrc_path() -> str:
    if path := os.environ.get("NETRC"):
        return os.path.expanduser(path)
    paths = [os.path.expanduser(f"~/{name}") for name in (".netrc", "_netrc")]
    return next((path for path in paths if os.path.exists(path)), paths[0])


def _wandb_settings() -> Mapping[str, str]:
    """What `wandb login --host` and `wandb offline` have written down: this directory's over the user's."""
    parser = configparser.ConfigParser(interpolation=None)
    user = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    root = Path(os.environ.get("WANDB_DIR", "."))
    directory = root / (".wandb" if (root / ".wandb").exists() else "wandb")
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        parser.read([user / "settings", directory / "settings"])
    return dict(parser["default"]) if parser.has_section("default") else {}


def open_sinks(tracking: TrackingConfig, run_dir: Path, settings: Mapping[str, Any]) -> "Sinks":
    """settings: the run's config, plain data."""
    openers: dict[Name, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(run_dir),
        "wandb": lambda: WandB(tracking.project, run_dir, settings),
        "mlflow": lambda: MLflow(tracking.project, run_dir, settings),
    }
    return Sinks({name: _imported(name, openers[name]) for name in tracking.sinks})


def _imported(name: Name, opener: Callable[[], Sink]) -> Callable[[], Sink]:
    """The opener, or one that fails as the import did.

    Imports here, in the main thread, as threads that import at once may disturb each other.
    """
    try:
        importlib.import_module(_MODULES[name])
    except (Exception, SystemExit) as error:  # of another's library
        reason = f"{_MODULES[name]} does not import ({one_line(error):.80})"
        failure = RunError(f"{reason}; run: pip install --force-reinstall {_PACKAGES[name]}")
        return partial(_fail, failure)
    return opener


def _fail(failure: RunError) -> Sink:
    raise failure


class Sinks:
    """All of them, each in a thread of its own, where it is opened too.

    None ends a run or holds it up: one that fails is named once, and left out from then on; one that does
    not keep up loses metrics, and that is said. `log` and `close` return what there is to say, a line each.
    """

    def __init__(
        self,
        openers: Mapping[str, Callable[[], Sink]],
        max_waiting: int = 1000,
        close_seconds: float = 60.0,
    ):
        """max_waiting: steps and evaluations that may wait for a sink. close_seconds: for all, at the end."""
        self._close_seconds = close_seconds
        self._threads = [_SinkThread(name, opener, max_waiting) for name, opener in openers.items()]

    def log(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        for thread in self._threads:
            thread.log(step, dict(metrics))
        return self._take_lines()

    def rewind(self, step: int) -> None:
        """Steps after `step` happen again."""
        for thread in self._threads:
            thread.rewind(step)

    async def close(self, failed: bool) -> list[str]:
        seconds = self._close_seconds
        await asyncio.gather(*(thread.close(failed, seconds) for thread in self._threads))
        return self._take_lines()

    def _take_lines(self) -> list[str]:
        return [line for thread in self._threads for line in thread.take_lines()]


class _SinkThread:
    """One sink, and the thread that calls it."""

    def __init__(self, name: str, opener: Callable[[], Sink], max_waiting: int):
        self._name = name
        self._opener = opener
        self._sink: Sink | None = None  # opened in the thread
        self._has_failed = False
        self._is_behind = False
        self._num_logged = self._num_written = 0  # each is counted by one thread alone
        self._lines: deque[str] = deque()  # both threads append
        self._writer = Writer(name, max_waiting)
        self._writer.put(lambda: self._call(lambda sink: None))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._has_failed:
            return
        self._num_logged += 1
        was_behind = self._is_behind
        self._is_behind = not self._writer.offer(partial(self._call, partial(self._log, step, metrics)), 1)
        if self._is_behind and not was_behind:
            self._lines.append(f"{self._name} does not keep up: it loses the metrics from step {step} on")

    def rewind(self, step: int) -> None:
        self._writer.put(partial(self._call, lambda sink: sink.rewind(step)))

    async def close(self, failed: bool, seconds: float) -> None:
        num_left = await self._writer.close(partial(self._call, lambda sink: sink.close(failed)), seconds)
        num_lost = self._num_logged - self._num_written
        if num_left:
            self._lines.append(f"{self._name} did not end within {seconds:.0f} s and is left alone")
        if num_lost and not self._has_failed:
            self._lines.append(f"{self._name} lacks the metrics of {num_lost} steps and evaluations")

    def take_lines(self) -> list[str]:
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def _log(self, step: int, metrics: Mapping[str, float], sink: Sink) -> None:
        sink.log(step, metrics)
        self._num_written += 1

    def _call(self, act: Callable[[Sink], None]) -> None:
        """In the thread."""
        if self._has_failed:
            return
        try:
            if self._sink is None:
                self._sink = self._opener()
            act(self._sink)
        except BaseException as error:  # of another's library: a network, a disk, an exit
            self._has_failed = True
            reason = message_of(error) or type(error).__name__
            self._lines.append(f"{self._name} gets no more metrics: {reason:.200}")
