"""A run whose controller is killed at each of its writes: `python -m tests.controller.kills DIRECTORY FIRST EVERY SETTING ...`.

One write is the making, renaming or removing of one name, or what follows it: the content of the file that was opened.
The run's processes are made up, but what they write as checkpoints is written by the engines' own code. Each life is a
process of its own, which kills itself; the next one goes on from what is left, as a scheduler starts it. Prints a line
for each kill after which the files or the numbers are not those of the run that nothing happened to.
"""

import contextlib
import gc
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from torch.distributed.checkpoint.metadata import Metadata

from rl.cluster import hosts
from rl.config import CriticConfig, ReferenceConfig, RunConfig
from rl.config.validate import validate
from rl.controller import run as run_module
from rl.loss.advantages.gae import GAE
from rl.loss.kl import KL
from rl.models.checkpoint_dir import begin, checksum_files, complete, read_record, write_checksums
from rl.observability.recorder import Recorder
from rl.observability.sinks import TrackingConfig
from tests.config.test_settings_effect import small
from tests.controller import fakes
from tests.plans import AMPLE

SETTINGS = {
    "plain": {"keep_checkpoints": 1},
    "a critic and a refreshed reference": {
        "advantages": GAE(), "critic": CriticConfig(), "kl": KL(coef=0.1),
        "reference": ReferenceConfig(refresh_every=2),
    },
    "finished groups": {"max_offpolicy_steps": 2, "record_batches": 2, "keep_checkpoints": 2},
}  # fmt: skip
_SECOND = 40
"""The writes of a second life that are tried."""
MAY_DIFFER = ("time/", "idle/", "buffer/")
_EVENTS = {
    "os.rename": 0,
    "os.remove": 0,
    "os.mkdir": 0,
    "os.rmdir": 0,
    "os.link": 1,
    "os.symlink": 1,
    "os.truncate": 0,
}
"""Of Python's audit hooks -> which argument is the name that changes."""


class Engine(fakes.FakeEngine):
    """Its weights are a number, which is all that it writes. A policy's checkpoint is complete once it is asked for the
    next, as that of an engine whose thread writes."""

    _writing: Callable[[], None] | None = None

    async def save_checkpoint(self, path, state, keep_last, wait=False):
        await self.finish_checkpoint()
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial")
        begin(partial, {"version": 1, "state": state, "checksums": checksum_files(1), "adapters": {}})

        updates = self.updates

        def finish():
            (partial / "weights").write_text(str(updates))
            write_checksums(partial, ["weights"], "0")
            (partial / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
            complete(partial, path, keep_last)

        self._writing = finish
        if wait:
            await self.finish_checkpoint()

    async def finish_checkpoint(self):
        if self._writing is not None:
            self._writing()
        self._writing = None

    async def load_checkpoint(self, path):
        state = read_record(Path(path))["state"]
        self.updates = int((Path(path) / "weights").read_text())
        return state

    async def save_hf(self, out_dir, adapter=None):
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        (Path(out_dir) / "weights").write_text(str(self.updates))

    async def load_weights(self, model_dir):
        self.updates = int((Path(model_dir) / "weights").read_text())


class Death:
    """Of this process, by its own hand, before the n-th write below a directory, or within the one before."""

    def __init__(self) -> None:
        self.directory, self.at, self.within, self.count = "", 0, False, 0
        self._opened = ""
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple) -> None:
        if not self.directory:
            return
        opened = event == "open" and _writes(*arguments[1:3])
        if not opened and event not in _EVENTS:
            return
        name = arguments[_EVENTS.get(event, 0)]
        if not isinstance(name, str | bytes | os.PathLike):
            return
        path = os.fsdecode(name)
        # What shutil.rmtree removes has a name without a directory.
        if os.path.isabs(path) and not path.startswith(self.directory):
            return
        self.count += 1
        if self.count == self.at:
            if self.within and self._opened:
                with contextlib.suppress(FileNotFoundError):  # it has another name already
                    os.truncate(self._opened, os.path.getsize(self._opened) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        self._opened = path if opened else ""


def _writes(mode: str | None, flags: int) -> bool:
    if mode is not None:
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def live(config: RunConfig, death: Death, at: int = 0, within: bool = False) -> int:
    """The status of a process that runs it: 0, or minus the signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            death.directory, death.at, death.within = os.path.abspath(config.run_dir), at, within
            code = run_module.run("small", config)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def with_fakes(config: RunConfig) -> None:
    """From now on `run` starts no processes, and draws nothing."""

    @asynccontextmanager
    async def launch(plan, models, run_dir, env, timeline, engines_without=None):
        yield fakes.fake_actors(config, run_dir)[0]

    fakes.FakeEngine = Engine
    run_module.launch = launch
    hosts.look_at_host = lambda: AMPLE.hosts[0]  # one core has no room for five processes
    run_module.rehearse = lambda *_: SimpleNamespace(problems=[], takes=())
    run_module.give_way_often = lambda: None
    Recorder.draw_curve = fakes.no_picture


def numbers(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if not n.startswith(MAY_DIFFER)} for line in lines]


def files(run_dir: Path) -> dict[str, object]:
    """Each name, with what the run has learned by then, and which rollouts it has recorded."""
    paths = [path for path in run_dir.rglob("*") if "logs" not in path.parts]
    names: dict[str, object] = {str(path.relative_to(run_dir)): "" for path in paths}
    names |= {name: (run_dir / name).read_text() for name in names if name.endswith("weights")}
    records = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    return names | {
        "rollouts.jsonl": [(record["step"], record["split"], record["prompt"]) for record in records]
    }


def why_another(run_dir: Path, whole: Path, config: RunConfig) -> str:
    """What differs, other than what an asynchronous run may do otherwise."""
    left, expected = files(run_dir), files(whole)
    if left.keys() != expected.keys():
        return f"names {sorted(left.keys() ^ expected.keys())}"
    if config.max_offpolicy_steps:
        return ""
    if left != expected:
        return f"the content of {[name for name in left if left[name] != expected[name]]}"
    return "" if numbers(run_dir) == numbers(whole) else "the numbers"


def main(setting: str, death: Death, directory: Path, first: int, every: int) -> int:
    config = small(
        steps=5,
        save_every=2,
        tracking=TrackingConfig(sinks=()),
        resume="latest",
        **SETTINGS[setting],
    )
    with_fakes(config)
    directory.mkdir()
    # What a life imports is imported once: transformers takes a second.
    problems = validate(replace(config, run_dir=str(directory / "none"), resume=""))
    assert not problems, problems
    gc.freeze()
    whole = directory / "whole"
    assert live(replace(config, run_dir=str(whole)), death) == 0
    kills = wrong = 0
    at = first
    while True:
        code = 0
        for within in (False, True):
            run_dir = directory / f"{at}{' within' * within}"
            settings = replace(config, run_dir=str(run_dir))
            code = live(settings, death, at, within)
            if code == 0:
                break
            assert code == -signal.SIGKILL, f"{run_dir}: {code}"
            kills += 1
            if within:  # the next life, too, at one of the writes with which it clears up and begins
                live(settings, death, 1 + at % _SECOND)
            again = live(settings, death)
            if differ := why_another(run_dir, whole, config) if again == 0 else f"it ended with {again}":
                wrong += 1
                print(f"killed before write {at}{' within the last' * within}: {differ}", flush=True)
        if code == 0:
            break
        at += every
    print(f"{setting}: {kills} kills, after {wrong} of which the run is another")
    return int(wrong > 0 or kills == 0)


if __name__ == "__main__":
    death = Death()
    place, first, every, *names = sys.argv[1:]
    sys.exit(max(main(name, death, Path(place) / name, int(first), int(every)) for name in names))
