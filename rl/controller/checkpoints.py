"""Checkpoints of a run: policy, critic, reference, and which prompts were on their way."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.actors.actors import Actors
from rl.controller.held_groups import remove_orphans
from rl.models.checkpoint_dir import RECORD, REFERENCES, critic_path, newest_first, prune, reference_weights

_NOT_THERE = (FileNotFoundError, NotADirectoryError)


async def save_checkpoint(
    actors: Actors, path: Path, state: Mapping[str, Any], reference_kind: str, keep_last: int
) -> None:
    """The critic's first, and one more of them is kept: if the policy's is complete, so is the critic's.

    state: the controller's, plain data, with the `step`.
    """
    path.parent.mkdir(exist_ok=True)
    if actors.critic is not None:
        await actors.trainer.finish_checkpoint()  # else the critic's of the last complete one would go
        kept = keep_last + 1 if keep_last else 0
        its_state = {"step": state["step"]}
        await actors.critic.save_checkpoint(str(critic_path(path)), its_state, kept, wait=True)
    weights = actors.reference.note() if actors.reference else ""
    state = {**state, "reference": [reference_kind, weights]}
    await actors.trainer.save_checkpoint(str(path), state, keep_last)


async def load_checkpoint(actors: Actors, path: str) -> dict[str, Any]:
    """Policy, critic and reference as they were when it was written. Returns the controller's state.

    Without a path they have just been started, at step 0.
    """
    if not path:
        if actors.reference is not None:
            await actors.reference.restore("")
        return {"step": 0}
    state = await actors.trainer.load_checkpoint(path)
    if actors.critic is not None:
        await actors.critic.load_checkpoint(str(critic_path(Path(path))))
    if actors.reference is not None:
        await actors.reference.restore(reference_weights(Path(path), state["reference"][1]))
    return state


def remove_older(run_dir: Path, keep_last: int) -> None:
    """At the run's end: what stayed where a life of it was killed right after a checkpoint was complete."""
    newest = newest_first(run_dir / "checkpoints")
    for path in newest[:1]:
        prune(path, keep_last)
        prune(critic_path(path), keep_last + 1 if keep_last else 0)
    remove_orphans(run_dir / "checkpoints")


async def refresh_reference(actors: Actors, run_dir: Path, step: int) -> None:
    """The reference becomes what the policy is after `step`; what checkpoints of the run note is kept."""
    assert actors.reference is not None
    await actors.reference.refresh(step, _noted_references(run_dir))


def _noted_references(run_dir: Path) -> set[str]:
    """By all checkpoints that are there, also those half written and those of an abandoned branch.

    All references where one of these cannot be read: it may note any.
    """
    noted = set()
    for path in [*run_dir.glob("checkpoints/*"), *run_dir.glob("abandoned/*/checkpoints/*")]:
        try:
            noted.add(str(json.loads((path / RECORD).read_text())["state"]["reference"][1]))
        except (*_NOT_THERE, ValueError, KeyError, TypeError, IndexError, RecursionError):
            continue  # it is no checkpoint of a run, or one that nothing can load
        except OSError:
            return {str(reference) for reference in (run_dir / REFERENCES).glob("*")}
    return noted


async def begin_at_policy(actors: Actors, run_dir: Path, *, teacher: bool) -> None:
    """Critic and reference, unless it is a teacher, take over the policy's weights."""
    if actors.reference is not None and not teacher:
        await refresh_reference(actors, run_dir, 0)
    if actors.critic is not None:
        path = run_dir / "warm_start"
        await actors.trainer.save_hf(str(path / "hf"), actors.adapter)
        await actors.critic.load_weights(str(path / "hf"))
        shutil.rmtree(path)
