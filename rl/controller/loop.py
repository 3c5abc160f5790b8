"""The synchronous loop: sample, score, estimate advantages, learn, publish; again. One loop for every algorithm.

What differs between them are parts of the config: `loss`, `advantages`, `kl`, `critic`, `data` and so on. What each of them does is
in rl/loss; here is their order alone.
"""

from dataclasses import dataclass, replace

from rl.controller.config import RunConfig
from rl.controller.experience import Experience, assess
from rl.controller.launch import Fleet
from rl.controller.rollouts import Sampling
from rl.controller.supervised import Lessons
from rl.controller.update import StepFailed, learn
from rl.errors import RunError
from rl.interfaces import Tokenizer
from rl.models.checkpoint_dir import is_complete, latest
from rl.observability.metrics import eval_metrics, group_metrics
from rl.observability.recorder import Recorder


@dataclass(frozen=True)
class Run:
    """A run: its settings, its actors, and where it reports."""

    config: RunConfig
    fleet: Fleet
    tokenizer: Tokenizer
    recorder: Recorder

    async def train(self) -> None:
        """All steps that are left; the policy before them is evaluated as the step before the first."""
        config, recorder = self.config, self.recorder
        done = await self.fleet.load_checkpoint(config.resume_from) if config.resume_from else await self.start()
        await self.fleet.publish(done)
        await self.evaluate(done)
        for step in range(done + 1, config.steps + 1):
            experience = await self.experience(step)
            with recorder.time("train"):
                try:
                    learned = await learn(experience, step, config, self.fleet)
                except StepFailed as failure:
                    raise await self.give_up(step, failure) from failure
            last, due = step == config.steps, step % config.eval_every == 0
            if config.data == "rollouts" or due or last:
                with recorder.time("sync"):
                    await self.fleet.publish(step)
            if self.fleet.reference and config.reference.refresh_every and step % config.reference.refresh_every == 0:
                await self.fleet.reference.refresh(step)
            alive = {"generators/alive": self.fleet.generators.num_alive}
            recorder.step(step, group_metrics(experience.groups) | experience.metrics | learned | alive, experience.groups)
            if due or last:
                await self.evaluate(step)
            if last or (config.save_every and step % config.save_every == 0):
                await self.save(step)
        await self.fleet.trainer.finish_checkpoint()

    async def experience(self, step: int) -> Experience:
        """What a step learns from."""
        with self.recorder.time("generate"):
            if self.config.data != "rollouts":
                return await Lessons(self.config, self.fleet, self.tokenizer).collect(step)
            groups, sampled, counts = await Sampling(self.config, self.fleet, self.tokenizer).collect(step)
        with self.recorder.time("assess"):
            experience = await assess(groups, self.config, self.fleet)
        return replace(experience, groups=sampled, metrics=experience.metrics | counts)

    async def start(self) -> int:
        """Warm up; reference and critic begin where the policy then is."""
        await Lessons(self.config, self.fleet, self.tokenizer).warm_up(self.recorder)
        if self.config.warmup.steps:
            await self.fleet.begin_at_policy(self.recorder.run_dir, teacher=self.config.reference.model is not None)
        return 0

    async def save(self, step: int) -> None:
        await self.fleet.save_checkpoint(self.recorder.checkpoint_path(step), step, self.config.keep_checkpoints)

    async def evaluate(self, step: int) -> None:
        """Greedy accuracy on the held-out problems."""
        with self.recorder.time("eval"):
            sampling = Sampling(self.config, self.fleet, self.tokenizer)
            groups = await sampling.rollout(self.config.env.eval_problems(), 0, greedy=True)
            sampling.check_rewards(groups)
        self.recorder.evaluation(step, eval_metrics(groups), groups)

    async def give_up(self, step: int, failure: StepFailed) -> RunError:
        """Leave the last good weights behind, and say who is to blame."""
        await self.fleet.trainer.finish_checkpoint()
        path = self.recorder.checkpoint_path(step - 1)
        if failure.untouched and not is_complete(path):
            await self.save(step - 1)
            await self.fleet.trainer.finish_checkpoint()
        good = latest(path.parent) or self.config.resume_from
        rest = f"go on from --resume_from {good}" if good else "no checkpoint was due yet: lower save_every"
        return RunError(f"{failure}; {await failure.find_sample()}; {rest}")
