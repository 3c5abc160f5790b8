"""The training loop: one for every algorithm, synchronous and asynchronous.

What waits in a run, for what, and what unblocks it:

| task | waits for | unblocked by |
|---|---|---|
| a prompt (RolloutBuffer) | its turn: at most (k + served + 1) * P start | a newer served version |
| next_batch | P groups, the due ones among them | groups that finish |
| update | the trainer, and the critic beside it | their answers |
| publish | room for a version in the WeightStore | a generator that has read an older one |
| a generator's update (GeneratorReplica) | a newer version | publish |
| evaluate | a generator that serves the step's version | that generator's update |

k is max_offpolicy_steps, P prompts_per_step. With k = 0 no prompt starts before its step's weights are
served: the synchronous loop. With k > 0 everything above goes on at the same time. Each call to a process has
a deadline (waiting.py), but a sample: its generator is watched for progress instead.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from rl.controller.schedule import Schedule


class Stages(Protocol):
    """What a step consists of. Step n takes the policy from version n - 1 to version n."""

    async def next_batch(self, step: int) -> Any: ...
    async def update(self, batch: Any, step: int) -> Mapping[str, float]: ...
    async def publish(self, step: int) -> None: ...
    async def refresh_reference(self, step: int) -> None: ...
    async def save(self, step: int) -> None: ...
    async def evaluate(self, step: int) -> None: ...
    def record(self, step: int, batch: Any, learned: Mapping[str, float]) -> None: ...


async def train(schedule: Schedule, stages: Stages) -> None:
    """All steps that are left; the policy before them is evaluated as the step before the first."""
    await stages.publish(schedule.first - 1)
    first = stages.evaluate(schedule.first - 1) if schedule.evaluate_first else asyncio.sleep(0)
    evaluation = asyncio.create_task(first)
    try:
        await evaluation
        for step in range(schedule.first, schedule.last + 1):
            if evaluation.done():
                evaluation.result()  # one that failed ends the run
            batch = await stages.next_batch(step)
            learned = await stages.update(batch, step)
            if schedule.publish_every_step or schedule.evaluates(step):
                await stages.publish(step)
            if schedule.refreshes(step):
                await stages.refresh_reference(step)
            stages.record(step, batch, learned)
            if schedule.saves(step):
                await stages.save(step)
            if schedule.evaluates(step):
                await evaluation  # the one before
                evaluation = asyncio.create_task(stages.evaluate(step))
                if not schedule.evaluate_beside:
                    await evaluation
        await evaluation
    finally:
        evaluation.cancel()
        await asyncio.wait({evaluation})  # another interrupt ends this, too
        if not evaluation.cancelled():
            evaluation.exception()  # nobody waits for it any more
