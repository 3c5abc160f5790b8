"""RunStages: what each stage of a step does, with real actors. loop.py has their order."""

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rl.actors.actors import Actors
from rl.actors.remote import EngineDied
from rl.config.learning import Learning
from rl.config.resume import is_own
from rl.controller.buffer import RolloutBuffer
from rl.controller.checkpoints import begin_at_policy, load_checkpoint, refresh_reference, save_checkpoint
from rl.controller.controls import Controls
from rl.controller.held_groups import write_prompts
from rl.controller.loop import train
from rl.controller.parity import PolicyMismatch
from rl.controller.rollouts import check_rewards
from rl.controller.schedule import SaveClock, Schedule
from rl.controller.supervised import SupervisedData, warm_up
from rl.controller.training_batch import Scorers, TrainingBatch, build_training_batch
from rl.controller.update import StepFailed, Updater, learn, stream
from rl.controller.updaters import rollout_buffer, rollouts, schedule_from, scorers, updaters
from rl.errors import RunError
from rl.interfaces import Tokenizer
from rl.models.checkpoint_dir import is_complete, latest
from rl.observability.metrics import eval_metrics, group_metrics, offpolicy_metrics
from rl.observability.recorder import Recorder
from rl.types import PolicyVersion
from rl.waiting import beside, num_interrupts


class RunStages:
    """See loop.Stages."""

    def __init__(
        self,
        learning: Learning,
        checkpoint: str,
        actors: Actors,
        tokenizer: Tokenizer,
        recorder: Recorder,
        goes_on: bool = False,
    ):
        """checkpoint: to go on from, or empty. goes_on: the recorder has what came before the first step."""
        self._learning = learning
        self._checkpoint = checkpoint
        self._goes_on = goes_on
        self._actors = actors
        self._recorder = recorder
        self._data = SupervisedData(learning.env, tokenizer, learning.seed)
        self._rollouts = rollouts(learning, tokenizer, actors)
        self._updaters = updaters(learning, actors)
        self._controls = Controls(self._learning, {})
        self.buffer: RolloutBuffer | None = None
        self._only_evaluating = False
        self._save_clock = SaveClock(learning.rhythm.save_every_minutes)
        self._schedule = Schedule(1, learning.pace.num_steps, learning.rhythm.eval_every)
        self._done = 0  # the last step whose update is complete
        self._updating = self._taken = False  # taken: prompts of the next one, from the buffer
        self._unrecorded: tuple[int, TrainingBatch, Mapping[str, float]] | None = None
        self._refreshed = 0  # the step after which the reference last became the policy
        self._sync_blocking = 0.0  # seconds for which the last publication held up the loop

    async def start(self) -> Schedule:
        """Warm up, or load the checkpoint; the steps that are left."""
        learning, actors = self._learning, self._actors
        await actors.enter("score")
        state = await load_checkpoint(actors, self._checkpoint)
        if self._checkpoint:
            self._controls = Controls(self._learning, state)
        else:
            await self._warm_up()
        if learning.algorithm.samples_rollouts:
            own = self._checkpoint if is_own(self._checkpoint, self._recorder.run_dir) else ""
            self.buffer = rollout_buffer(learning, self._rollouts, actors.generators, state, own)
        schedule = schedule_from(state["step"] + 1, learning, actors, self._save_clock)
        # One that was interrupted beside later steps is made up for, of the policy as it is now.
        since = range(schedule.newest_evaluated(state["step"]), state["step"] + 1)
        if self._goes_on and not self._recorder.accuracies.keys().isdisjoint(since):
            schedule = replace(schedule, evaluate_first=False)
        return schedule

    async def run(self) -> None:
        """The whole run. Beside the loop, the buffer starts prompts as new versions are served.

        Without generators no prompt starts and nothing is evaluated: the run ends with their death.
        """
        self._schedule = await self.start()
        self._done = self._schedule.first - 1
        try:
            async with beside(*self._beside_the_loop()):
                await train(self._schedule, self)
        except (asyncio.CancelledError, Exception) as end:
            if self.buffer is not None:
                self.buffer.close()  # by turns, the trainer comes once nothing is sampled
            if not isinstance(end, EngineDied) and num_interrupts() < 2:
                await self._leave(end)
            raise
        finally:
            if self.buffer is not None:
                self.buffer.close()
            await self._rollouts.close()

    def _beside_the_loop(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._actors.generators.until_dead()
        if self.buffer is not None:
            yield self.buffer.follow(self._served, self._actors.generators.changed)

    @property
    def _policy(self) -> Updater:
        return replace(self._updaters[0], loss=self._controls.algorithm.objective)

    def _served(self) -> PolicyVersion | None:
        """What prompts may start with: nothing while an evaluation stands still for itself."""
        return None if self._only_evaluating else self._actors.generators.served

    async def next_batch(self, step: int) -> TrainingBatch:
        """Where groups are streamed, all parts but the last are in the gradient when this returns."""
        self._save_clock.begin()
        learning, algorithm, buffer = self._learning, self._controls.algorithm, self.buffer
        inputs = scorers(algorithm, self._actors)
        if buffer is None:
            if inputs:
                await self._actors.enter("score")
            return await self._data.batch(step, learning.pace.groups_per_step, algorithm, inputs)
        batch = await self._next_part(buffer, step, inputs)
        for _ in range(1, learning.num_parts):
            try:
                batch = await stream(batch, step, self._policy)
            except StepFailed as failure:
                raise await self._give_up(step, failure) from failure
            batch = batch.joined(await self._next_part(buffer, step, inputs))
        record, reads = partial(self._recorder.rollouts, step, "train"), learning.algorithm.reads_rewards
        check_rewards(batch.sampled, step > 1, record, reads)
        return batch

    async def _next_part(self, buffer: RolloutBuffer, step: int, inputs: Scorers) -> TrainingBatch:
        await self._actors.enter("generate")
        taken = await buffer.take(step - 1, self._learning.groups_per_part)
        self._taken = True
        if inputs:
            await self._actors.enter("score")
        part = await build_training_batch(taken.groups, self._controls.algorithm, inputs)
        return replace(part, filtered=list(taken.filtered))

    async def update(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        """One that is interrupted ends first, so that a checkpoint is of whole steps."""
        if keep := self._learning.rhythm.record_batches:
            await self._recorder.keep_batch(step, batch, self._controls.entropy.coef, keep)
        self._updating = True
        updating = asyncio.create_task(self._update(batch, step))
        try:
            learned = await asyncio.shield(updating)
        except asyncio.CancelledError:
            self._finished(step, batch, await updating)
            raise
        self._finished(step, batch, learned)
        return learned

    def _finished(self, step: int, batch: TrainingBatch, learned: Mapping[str, float]) -> None:
        self._done, self._taken, self._updating = step, False, False
        self._unrecorded = step, batch, learned

    async def _update(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        coming = self.buffer.coming if self.buffer and step < self._learning.pace.num_steps else ()
        preparing = asyncio.create_task(self._rollouts.prepare(coming))
        before, seed, critic = self._controls.state, self._learning.seed, self._updaters[1]
        try:
            await self._actors.enter("train")
            parity, entropy = self._controls.parity, self._controls.entropy
            learned = await learn(batch, step, self._controls.algorithm, seed, self._policy, critic, parity)
            await preparing
            if self._learning.algorithm.entropy.used:
                learned["entropy/coef"] = entropy.coef
            entropy.observe(learned["entropy"])
            return learned
        except (StepFailed, PolicyMismatch) as failure:
            self._controls = Controls(self._learning, before)  # as the checkpoint of the step before has them
            if isinstance(failure, StepFailed):
                raise await self._give_up(step, failure) from failure
            self._updating = critic is not None  # else all is as it was after that step
            raise

    async def publish(self, step: int) -> None:
        """Blocks until the weights are written; generators fetch them while the next step goes on."""
        began, schedule = time.monotonic(), self._schedule
        if step == schedule.first - 1:
            self._only_evaluating = schedule.evaluate_first
        else:
            self._only_evaluating = schedule.evaluates(step) and not schedule.evaluate_beside
        await self._actors.enter("sync")
        await self._actors.publish(step)
        self._sync_blocking = time.monotonic() - began
        if step == schedule.first - 1:  # that of no step
            self._sync_blocking = 0.0
            if not schedule.evaluate_first:
                self._recorder.begin_steps()

    async def refresh_reference(self, step: int) -> None:
        await self._actors.enter("score")
        await refresh_reference(self._actors, self._recorder.run_dir, step)
        self._refreshed = step

    async def save(self, step: int, *, taken: bool = False) -> None:
        """taken: prompts of the next step have been taken from the buffer."""
        learning, buffer = self._learning, self.buffer
        path = self._recorder.run_dir / "checkpoints" / f"step-{step}"
        state = {**learning.checkpoint_notes, "step": step, **self._controls.state}
        await self._actors.enter("train")
        await self._recorder.flush()  # who resumes counts on the lines up to this step
        if buffer is not None:
            prompts = buffer.state_before_step if taken else buffer.state
            scored_by = learning.scored_by
            state["prompts"] = await self._recorder.write(lambda: write_prompts(path, prompts, scored_by))
        kept = learning.rhythm.keep_checkpoints
        await save_checkpoint(self._actors, path, state, learning.reference_kind, kept)
        self._save_clock.saved()

    async def _leave(self, end: BaseException) -> None:
        """Record and save whole steps. end: an interrupt, or what ends the run while the trainer is well."""
        if self._unrecorded is not None:
            self.record(*self._unrecorded)
        step, path = f"step {self._done}", self._recorder.run_dir / "checkpoints" / f"step-{self._done}"
        critic = self._actors.critic
        if self._actors.trainer.is_stuck or (critic is not None and critic.is_stuck):
            return
        why = "interrupted" if isinstance(end, asyncio.CancelledError) else str(end) or repr(end)
        try:
            await self._actors.trainer.finish_checkpoint()
            if self._updating or self._done < self._schedule.first or is_complete(path):
                return
            self._recorder.say(f"{why}: saving a checkpoint of {step}; once more to end without it")
            if self._schedule.refreshes(self._done) and self._refreshed != self._done:
                await self.refresh_reference(self._done)
            await self.save(self._done, taken=self._taken)
            await self._actors.trainer.finish_checkpoint()
        except (RunError, OSError) as error:  # what ended the run is raised, not what followed from it
            self._recorder.say(f"no checkpoint of {step}: {error}")

    async def evaluate(self, step: int) -> None:
        """Greedy accuracy on the held-out problems, of one version.

        Generators stay at that version until they have answered. The time in which they load it is the next
        step's, which would wait for it otherwise.
        """
        generators = self._actors.generators
        await self._actors.enter("generate")
        async with generators.pinned() as (version, sampler):
            await generators.wait_served(version)
            began = self._recorder.now()
            groups = await self._rollouts.evaluate(sampler)
        if self._learning.algorithm.reads_rewards:
            check_rewards(groups, step > 0, partial(self._recorder.rollouts, step, "eval"))
        metrics = eval_metrics(groups) | {"eval/version": version}
        since = 0.0 if step < self._schedule.first else began  # before the first step all is a pause
        if self._only_evaluating:
            self._save_clock.evaluated(self._recorder.now() - began)
        self._recorder.evaluation(step, metrics, groups, since if self._only_evaluating else None)
        self._only_evaluating = False
        generators.changed.notify()

    def record(self, step: int, batch: TrainingBatch, learned: Mapping[str, float]) -> None:
        self._unrecorded = None
        metrics = group_metrics(batch.sampled) | batch.metrics | dict(learned)
        metrics |= self._actors.generators.take_metrics() | {"time/sync_blocking": self._sync_blocking}
        self._sync_blocking = 0.0  # supervised steps publish nothing but before evaluations
        if self.buffer is not None:
            metrics |= offpolicy_metrics(batch.rollouts, step - 1) | self.buffer.metrics
        if self._learning.pace.max_filtered_per_step:
            metrics["resampling/extra_prompts"] = len(batch.filtered)
        self._recorder.step(step, metrics, batch.sampled, batch.samples_of)

    async def _warm_up(self) -> None:
        """Reference and critic begin where the policy then is."""
        warmup = self._learning.warmup
        await warm_up(
            self._data, self._actors.trainer, self._actors.adapter,
            steps=warmup.steps, batch_size=warmup.batch_size, lr=warmup.lr,
            report=lambda step, loss: self._recorder.warmup(step, warmup.steps, loss),
        )  # fmt: skip
        if warmup.steps:
            teacher = self._learning.reference_kind == "teacher"
            await begin_at_policy(self._actors, self._recorder.run_dir, teacher=teacher)

    async def _give_up(self, step: int, failure: StepFailed) -> RunError:
        """Leave the last good weights behind, and say who is to blame."""
        trainer, checkpoints = self._actors.trainer, self._recorder.run_dir / "checkpoints"
        await trainer.finish_checkpoint()
        if failure.untouched and not is_complete(checkpoints / f"step-{step - 1}"):
            await self.save(step - 1, taken=True)
            await trainer.finish_checkpoint()
        good = latest(checkpoints) or self._checkpoint
        lower = f"no checkpoint was due yet: set save_every to at most {step - 1}, and at least 1"
        remedy = f"go on from --resume {good}" if good else lower if step > 1 else "begin the run again"
        return RunError(f"{failure}; {await failure.find_sample()}; {remedy}")
