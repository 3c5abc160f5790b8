"""What a run survives: deaths of trainer, critic or reference, from the newest checkpoint on.

The controller, generators and reward workers stay. Engines are started again and load the checkpoint; its
prompts are taken up where they were, so that each is trained on as often as without the death; and what was
recorded after the checkpoint is forgotten, because it happens again. A synchronous run then has the numbers
of one that nothing happened to.
"""

import asyncio
import re
from pathlib import Path

from rl.actors.actors import Actors
from rl.actors.remote import EngineDied
from rl.config.learning import Learning
from rl.config.resume import began_from, is_own, newest_good, origin_of
from rl.controller.abandoned import abandon_after, remove_unfinished
from rl.controller.stages import RunStages
from rl.errors import DamagedCheckpoint
from rl.interfaces import Tokenizer
from rl.models.checkpoint_dir import another, newest_first
from rl.observability.recorder import Recorder
from rl.waiting import num_interrupts


async def train_and_export(
    learning: Learning,
    checkpoint: str,
    actors: Actors,
    tokenizer: Tokenizer,
    recorder: Recorder,
    goes_on: bool,
    is_named: bool = False,
) -> None:
    """checkpoint: empty at a run's beginning. goes_on: it is of this run's own directory. is_named: the user
    chose it.

    Where one that nobody chose is damaged, which only loading it shows, the run goes on from one before it.
    """
    own = is_own(checkpoint, recorder.run_dir)
    origin = origin_of(recorder.run_dir) or ("" if own else checkpoint)
    needs_critic = learning.algorithm.needs_critic
    while True:
        try:
            await RunStages(learning, checkpoint, actors, tokenizer, recorder, goes_on).run()
            await actors.enter("train")
            await finish_last(actors, recorder)
            return await actors.trainer.save_hf(str(recorder.run_dir / "hf"), actors.adapter)
        except EngineDied as death:
            if num_interrupts():  # a signal to a whole job ends processes, too
                recorder.say(f"interrupted; {death}: the newest checkpoint is what is left")
                raise asyncio.CancelledError from death
            written = newest_first(recorder.run_dir / "checkpoints")
            await actors.restart_engines(death, step_of(str(written[0])) if written else 0)
            await recorder.write(lambda: remove_unfinished(recorder.run_dir))  # after what is still written
        except DamagedCheckpoint as damage:
            began = began_from(recorder.run_dir)
            if checkpoint == origin_of(recorder.run_dir) != began:  # a link to what the user knows
                what = str(damage).partition(";")[0]
                raise DamagedCheckpoint(f"{what}, as {began} is; {another(Path(began))}") from damage
            if is_named or not is_own(checkpoint, recorder.run_dir):
                raise
            recorder.say(str(damage))
            await _abandon_after(recorder, step_of(checkpoint) - 1)
            if actors.critic and not (origin or newest_good(recorder.run_dir, needs_critic)):
                # The policy has been loaded before the critic's damage showed.
                await actors.restart_engines(EngineDied(str(damage)))
        newest = newest_good(recorder.run_dir, needs_critic)
        checkpoint = str(newest or origin)
        await _abandon_after(recorder, step_of(checkpoint) if newest else -1)
        is_named = is_named and newest is None
        goes_on = newest is not None or goes_on or not checkpoint
        before = step_of(checkpoint)
        await recorder.rewind(before if goes_on else before - 1)  # else it is evaluated again
        recorder.say(f"going on from {checkpoint or 'the beginning'}")


async def finish_last(actors: Actors, recorder: Recorder) -> None:
    """Of the last step: it is written to its end also where it is interrupted once."""
    try:
        await actors.trainer.finish_checkpoint()
    except asyncio.CancelledError:
        recorder.say("interrupted: the last checkpoint is being written; once more to end without it")
        again = actors.trainer.finish_checkpoint()
        await again
        raise


async def _abandon_after(recorder: Recorder, step: int) -> None:
    """Where files are written: it copies what was recorded, all of it, which takes long."""
    if left := await recorder.write(lambda: abandon_after(recorder.run_dir, step)):
        recorder.say(left)


def step_of(checkpoint: str) -> int:
    """The step after which it was written; 0 for none."""
    match = re.fullmatch(r"step-(\d+)", Path(checkpoint).name)
    return int(match[1]) if match else 0
