"""Checkpoints of a run: policy, critic, reference, and which prompts were on their way."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.actors.actors import Actors


def critic_path(path: Path) -> Path:
    """The critic's checkpoint beside the policy's."""
    return path.parent.with_name("critic_checkpoints") / path.name


async def save_checkpoint(
    actors: Actors, path: Path, state: Mapping[str, Any], reference_kind: str, keep_last: int
) -> None:
    """The critic's first, and one more of them is kept: if the policy's is complete, so is the critic's.

    state: the controller's, plain data.
    """
    path.parent.mkdir(exist_ok=True)
    if actors.critic is not None:
        kept = keep_last + 1 if keep_last else 0
        await actors.critic.save_checkpoint(str(critic_path(path)), {}, kept, wait=True)
    weights = actors.reference.keep(path) if actors.reference else ""
    state = {**state, "reference": [reference_kind, weights]}
    await actors.trainer.save_checkpoint(str(path), state, keep_last)


async def load_checkpoint(actors: Actors, path: str) -> dict[str, Any]:
    """Policy, critic and reference as they were when it was written. Returns the controller's state."""
    state = await actors.trainer.load_checkpoint(path)
    if actors.critic is not None:
        await actors.critic.load_checkpoint(str(critic_path(Path(path))))
    if actors.reference is not None:
        await actors.reference.restore(state["reference"][1])
    return state


async def begin_at_policy(actors: Actors, run_dir: Path, *, teacher: bool) -> None:
    """Critic and reference, unless it is a teacher, take over the policy's weights."""
    if actors.reference is not None and not teacher:
        await actors.reference.refresh(0)
    if actors.critic is not None:
        path = run_dir / "warm_start"
        await actors.trainer.save_hf(str(path / "hf"), actors.adapter)
        await actors.critic.load_weights(str(path / "hf"))
        shutil.rmtree(path)
