"""No wait without an end: whatever dies, hangs or is interrupted at any await of the controller, the run ends.

The awaits are those of the syntax tree. Scenarios reach each of them; then, for each, the run is done again,
and when a task is in that await something happens. Time is virtual: a wait of an hour costs nothing, and one
without an end is seen at once.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest

from configs.algorithms import dpo, sft
from configs.calculator import calculator
from configs.quickstart import quickstart
from rl.config import CriticConfig, ReferenceConfig, WarmupConfig
from rl.envs.sort_letters import SortLetters
from rl.errors import RunError
from rl.loss.advantages.gae import GAE
from rl.loss.kl import KL
from rl.models.layout import Layout
from rl.types import LoRA
from rl.waiting import Deadlines
from tests.controller.awaits import ROOT, Await, awaits, waiting
from tests.controller.whole_run import World
from tests.virtual_time import VirtualLoop

OTHERS = {
    "actors/births.py": "real processes: tests/actors/test_births.py",
    "actors/judge.py": "tests/actors/test_judge.py",
    "cluster/host_agent.py": "real connections: tests/cluster/test_host_agent.py",
    "cluster/hosted_run.py": "real processes: tests/cluster/test_host_agent.py",
    "cluster/launch.py": "real processes: tests/chaos, tests/integration",
    "cluster/launchers.py": "real processes: tests/hosts",
    "cluster/joining.py": "real connections: tests/cluster/test_joining.py",
    "cluster/unshared.py": "real connections: tests/cluster/test_unshared.py",
    "cluster/link_speed.py": "real connections: tests/cluster/test_host_agent.py",
    "cluster/leases.py": "real connections: tests/cluster/test_host_agent.py",
    "cluster/spawn.py": "real processes: tests/chaos, tests/integration",
    "cluster/spawner.py": "real processes: tests/chaos, tests/integration",
    "controller/evaluate.py": "tests/controller/test_evaluate.py, tests/integration",
    "controller/replay.py": "tests/integration/test_replay.py",
    "config/rehearsal.py": "before a run: tests/controller/test_check.py",
    "controller/reward_hosts.py": "before the first step: tests/controller/test_reward_hosts.py",
    "controller/run.py": "tests/test_processes.py, tests/controller/test_bad_days.py",
    "gpu_stack_checks.py": "is no run",
    "observability/files.py": "tests/observability",
    "observability/recorder.py": "tests/observability",
    "observability/sinks.py": "tests/observability",
    "observability/writer.py": "tests/observability",
    "weight_sync/remote_files.py": "a worker's: tests/weight_sync/test_delta.py",
    "weight_sync/torchstore.py": "real processes: tests/chaos/test_ends.py",
}
"""Files with awaits that are not asked here, and where they are."""

_OTHER_PROCESSES = ("tinker/", "envs/", "models/")  # which have tests of their own


@cache
def files() -> tuple[str, ...]:
    names = (str(path.relative_to(ROOT)) for path in sorted(ROOT.rglob("*.py")))
    asked = (name for name in names if name not in OTHERS and not name.startswith(_OTHER_PROCESSES))
    return tuple(filter(awaits, asked))


ELSEWHERE = {
    '_every("remove_adapter"': "the Tinker server's",
    '_every("save_adapter"': "the Tinker server's",
    '_every("load_adapter_state"': "the Tinker server's",
    '"forward_backward_logprobs"': "the Tinker server's",
    "_sample(lambda replica: True": "the Tinker server's",
    "await coroutines[index]": "results_of, the Tinker server's: tests/tinker/test_tenants.py",
    "together(map(keep": "results_of, the Tinker server's: tests/tinker/test_tenants.py",
    "self._rollouts.close()": "an AgentEnv's endpoint: tests/envs",
    "self.door.close()": "an AgentEnv's endpoint: tests/envs",
    'self._verb("act"': "an AgentEnv's: tests/envs",
    "to_thread(self._copy, weights)": "another run's reference: tests/controller/test_checkpoints.py",
    'restore("")': "of no weights, which waits for nothing",
    "step_of(checkpoint) - 1)": "a damaged checkpoint: tests/controller/test_recovery.py",
    "restart_engines(EngineDied(str(damage)))": "a damaged checkpoint: tests/controller/test_recovery.py",
    "batch = await self.pack(samples)": "the Tinker server's",
    'leave_to("score")': "of a death that is noticed while generators are there: tests/actors/test_turns.py",
    "await self._drain()": "of a request beyond the step's last: tests/actors/test_turns.py",
    "OTHER_HOSTS[host].kill": "another host's: tests/cluster/test_host_agent.py",
    "_try_later(": "of weights on a lost host: tests/actors/test_generator_replica.py",
    "_TRY_SECONDS": "of weights on a lost host: tests/actors/test_generator_replica.py",
    "_host.arrival(": "a host that joins: tests/actors/test_replica.py",
    "reaper.reap": "real zombies: tests/test_processes.py",
    "_REAP_SECONDS": "real zombies: tests/test_processes.py",
    "await self.wait_for_room(name)": "a run waits for room before, with a deadline",
    "return await work": "of work that is done",
    "await preparing": "of prompts that are made while the update goes on, and long before its end",
    "await again": "an interrupt as the last checkpoint is written: tests/controller/test_interrupt.py",
    "(await request.receive())": "of a judge's client: tests/actors/test_judge.py",
    "asyncio.wait((working, watching)": "of a judge's client: tests/actors/test_judge.py",
    'self._verb("score': "of an episode that a budget cuts off: tests/envs",
}
"""Awaits in which no run of these scenarios waits, by a part of their line, and why."""


def base(recipe=quickstart, **changes):
    settings = replace(
        recipe(), env=SortLetters(num_eval=2), warmup=WarmupConfig(steps=1, batch_size=2), steps=3,
        save_every=2, prompts_per_step=2, group_size=2, eval_every=2, max_logprob_diff=1e9,
        deadlines=Deadlines(start=30, load=60, progress=12, train=180, sync=60, checkpoint=180),
    )  # fmt: skip
    return replace(settings, **changes)


@dataclass(frozen=True)
class Scenario:
    """A run, and what happens to it first.

    before: parts of awaits' lines, and what happens when a task comes there, the n-th time; one after the other.
    """

    config: object
    options: dict | None = None
    before: tuple[tuple[str, str, int], ...] = ()

    def world(self, directory) -> World:
        return World(self.config, directory, **(self.options or {}))

    @property
    def may_fail(self) -> bool:
        """Without an event of the test's: what it is about ends the run, or something dies."""
        return bool(self.before or {"fail_on", "mismatch"} & (self.options or {}).keys())


SYNC, ASYNC = base(), base(max_offpolicy_steps=1)
REFERENCE = base(kl=KL(coef=0.1), reference=ReferenceConfig(refresh_every=1))
CRITIC = base(advantages=GAE(), critic=CriticConfig(), save_every=1)
TURNS = replace(SYNC, placement="by_turns", generator=replace(SYNC.generator, num_replicas=2))
TURNS_OF_ALL = {"kl": KL(coef=0.1), "reference": ReferenceConfig(refresh_every=1), "placement": "by_turns"}
TWO_RANKS = replace(SYNC, trainer=replace(SYNC.trainer, layout=Layout(shard=2)))
LONG_EVALUATION = replace(ASYNC, eval_every=1, steps=4)
ADAPTER = base(kl=KL(coef=0.1), trainer=replace(SYNC.trainer, lora=LoRA(rank=4)))
BASE = "await self.store.publish(MODEL"
DRAINED = replace(ASYNC, generator=replace(ASYNC.generator, updates="drain"))
EPISODES = replace(
    calculator(), env=replace(calculator().env, num_eval=2), warmup=WarmupConfig(), steps=2,
    prompts_per_step=2, group_size=2, eval_every=2, max_logprob_diff=1e9, deadlines=SYNC.deadlines,
)  # fmt: skip
SLOW_LOADS = {
    "num_generators": 2,
    "slow": {"generator-0.load_weights": 2000, "generator-1.load_weights": 500},
}
SCENARIOS = {
    "synchronous": Scenario(SYNC),
    "asynchronous": Scenario(ASYNC, {"slow": {"sample": 9}}),
    "streamed": Scenario(base(stream_groups=1), {"slow": {"sample": 20}}),
    "drained": Scenario(DRAINED, {"slow": {"sample": 9}}),
    "reference": Scenario(REFERENCE),
    "critic": Scenario(CRITIC),
    "adapter": Scenario(ADAPTER),
    "by turns": Scenario(TURNS, {"num_generators": 2}),
    "by turns, with all roles": Scenario(replace(CRITIC, **TURNS_OF_ALL), {"slow": {"generator-0.load_weights": 50}}),
    "a death by turns": Scenario(
        replace(CRITIC, **TURNS_OF_ALL), before=(("engine.suspend(", "trainer dies", 2), ("engine.resume(", "critic dies", 2))),
    "a death at the first turn": Scenario(TURNS, {"num_generators": 2}, (("engine.suspend(", "trainer dies", 1),)),
    "a generator's death by turns": Scenario(
        TURNS, {"num_generators": 2}, (('_change("suspend")', "generator dies", 1),)),
    "large batches": Scenario(SYNC, {"in_threads": True}),
    "recorded batches": Scenario(base(record_batches=1)),
    "demonstrations": Scenario(base(sft, warmup=WarmupConfig())),
    "preferences": Scenario(base(dpo)),
    "preferences by turns": Scenario(base(dpo, placement="by_turns")),
    "episodes": Scenario(EPISODES),
    "two ranks": Scenario(TWO_RANKS),
    "two generators": Scenario(ASYNC, {"num_generators": 2}),
    "slow loads": Scenario(replace(ASYNC, steps=5), SLOW_LOADS),
    "a long evaluation": Scenario(LONG_EVALUATION, {"slow": {"sample": 30}}),
    "a loss that is not finite": Scenario(SYNC, {"fail_on": ("loss", None, 2)}),
    "a gradient that is not finite": Scenario(SYNC, {"fail_on": ("grad_norm", None, 2)}),
    "a streamed loss that is not finite": Scenario(base(stream_groups=1), {"fail_on": ("loss", None, 2)}),
    "a mismatch": Scenario(replace(SYNC, max_logprob_diff=1e-9), {"mismatch": 1.0}),
    "a death at the start": Scenario(SYNC, before=(("await self.ready()", "trainer dies", 1),)),
    "a death": Scenario(REFERENCE, before=(("asyncio.shield(updating)", "trainer dies", 3),)),
    "a critic's death": Scenario(CRITIC, before=(("asyncio.shield(updating)", "critic dies", 3),)),
    "a rank's death": Scenario(TWO_RANKS, before=(("asyncio.shield(updating)", "trainer dies", 1),)),
    "a death while loading": Scenario(
        replace(ASYNC, steps=5), SLOW_LOADS, (("await stages.publish(step)", "trainer dies", 1),)),
    "a generator's death": Scenario(SYNC, before=(("_caller.call(call, \"sample\"", "generator dies", 3),)),
    "a worker's death": Scenario(EPISODES, before=(("answer = await self._ask", "reward dies", 1),)),
    "a death in a restart": Scenario(
        replace(SYNC, save_every=1), {"restarts": 12},
        (("asyncio.shield(updating)", "trainer dies", 1), ("await self.ready()", "trainer dies", 1))),
    "an adapter's death at the start": Scenario(ADAPTER, before=((BASE, "trainer dies", 1),)),
    "an adapter's death": Scenario(ADAPTER, before=(("asyncio.shield(updating)", "trainer dies", 2),)),
    "an interrupt": Scenario(REFERENCE, before=(("await stages.save(step)", "interrupt", 1),)),
    "an interrupt of an update": Scenario(REFERENCE, before=(("asyncio.shield(updating)", "interrupt", 1),)),
    "an interrupt of an episode": Scenario(EPISODES, before=(("answer = await self._ask", "interrupt", 1),)),
    "an interrupt of an evaluation": Scenario(
        LONG_EVALUATION, {"slow": {"sample": 30}}, (("self._rollouts.evaluate(sampler)", "interrupt", 3),)),
}  # fmt: skip


def _do(world: World, what: str, task: asyncio.Task) -> None:
    """What happens, in a word or two: `trainer dies`, `generator dies for good`, `interrupt`, ..."""
    role, _, how = what.partition(" ")
    match how:
        case "dies":
            world.kill(role)
        case "dies for good":
            world.kill(role, for_good=True)
        case "hangs":
            world.hang(role)
        case "is cancelled":  # by a library that an environment uses
            prompts = [
                t
                for t in asyncio.all_tasks(task.get_loop())
                if t.get_coro().__qualname__ == "RolloutBuffer._run"
            ]
            for prompt in sorted(prompts, key=asyncio.Task.get_name)[:1]:
                prompt.cancel()
        case "and trainer die":  # as a signal to a whole job
            task.cancel()
            world.kill("trainer")
        case "":
            task.cancel()


class _Loop(VirtualLoop):
    """Asks at each of its turns."""

    at_turn: Callable[[], None] = staticmethod(lambda: None)

    def _run_once(self) -> None:
        self.at_turn()
        super()._run_once()


@dataclass
class Outcome:
    """`error`: what ended the run; None: it came to its end. `turns`: await -> the loop's turn that saw it
    first, after what the scenario has happen; `before`: the turns in which that happened."""

    world: World
    turns: dict[Await, int]
    before: list[int]
    error: BaseException | None
    seconds: float
    happened: bool


def happen(
    scenario: Scenario, directory, at: Await | None = None, what: str = "", hint: Outcome | None = None
) -> Outcome:
    """Run it. at: when a task first waits there, after what the scenario has happen itself.

    hint: of the same run without the event: only turns near those of its events are looked at, since a look
    takes longer than a turn.
    """
    world, turns, before, turn = scenario.world(directory), {}, [], 0
    happened, was_before = not what, False
    begin = hint.turns[at] - 3 if hint and at else 0

    def look() -> None:
        nonlocal happened, was_before, turn
        turn += 1
        # holds: exact, the clock is virtual
        assert loop.time() < 3 * _LIMIT, "it waits for ever: only heartbeats go on"
        task = tasks[0] if tasks else None
        if task is None or task.done() or (happened and at is not None and not pending):
            return
        if hint and turn != hint.before[len(before)] if pending else turn < begin:
            return
        places = waiting(loop)
        if not pending:
            for place in places:
                turns.setdefault(place, turn)
        if pending:
            part, first, times = pending[0]
            is_before = any(part in place.code for place in places)
            if is_before and not was_before:
                pending[0] = part, first, 0 if hint else times - 1
            was_before = is_before
            if pending[0][2] == 0:
                pending.pop(0)
                before.append(turn)
                was_before = False
                _do(world, first, task)
        elif not happened and at in places:
            happened = True
            _do(world, what, task)

    async def main() -> None:
        tasks.append(asyncio.create_task(world.run()))
        await tasks[0]

    tasks: list[asyncio.Task] = []
    pending = list(scenario.before)
    error: BaseException | None = None
    with asyncio.Runner(loop_factory=_Loop) as runner:
        loop = runner.get_loop()
        loop.at_turn = look
        try:
            runner.run(main())
        except (RunError, asyncio.CancelledError) as ending:
            error = ending
        seconds = loop.time()
        loop.at_turn = lambda: None
    return Outcome(world, turns, before, error, seconds, happened and not pending)


ROLES = ("trainer", "critic", "reference", "generator", "reward")
EVENTS = [f"{role} {how}" for role in ROLES for how in ("dies", "dies for good", "hangs")]
EVENTS += ["interrupt", "interrupt and trainer die", "prompt is cancelled"]
_LIMIT = 1.5 * sum(vars(SYNC.deadlines).values())
"""Virtual seconds: a run may wait for one deadline after the other."""


def check(scenario: Scenario, at: Await, what: str, directory, undisturbed: Outcome) -> None:
    """Raises AssertionError where the run does not end as it should."""
    outcome = happen(scenario, directory, at, what, undisturbed)
    for _ in range(5):
        if outcome.happened:
            break
        shutil.rmtree(directory)  # threads made the turns others
        outcome = happen(scenario, directory, at, what)
    assert outcome.happened, "it happened at no turn"
    assert outcome.seconds < undisturbed.seconds + _LIMIT
    error, role = outcome.error, what.split()[0]
    own = undisturbed.error
    if isinstance(own, RunError) and str(error)[:40] == str(own)[:40]:
        return  # what the scenario is about ended it
    if role == "interrupt":
        assert isinstance(error, asyncio.CancelledError), f"the interrupt is forgotten: {error}"
    elif what.endswith(("for good", "hangs", "cancelled")):  # what hangs may have been given too little time
        assert error is None or role in str(error) or type(error) is type(own), error
    else:
        assert error is None or isinstance(own, asyncio.CancelledError), error
        if not scenario.config.max_offpolicy_steps and error is own is None:
            assert outcome.world.numbers == undisturbed.world.numbers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    logging.getLogger("rl").setLevel(logging.ERROR)
    yield {name: happen(s, tmp_path_factory.mktemp("run")) for name, s in SCENARIOS.items()}
    logging.getLogger("rl").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def reached(undisturbed):
    """Await -> the scenarios in which a task waits there."""
    names: dict[Await, list[str]] = {}
    for name, outcome in undisturbed.items():
        assert outcome.happened, f"{name}: what it is about has not happened"
        assert SCENARIOS[name].may_fail or outcome.error is None, f"{name}: {outcome.error}"
        for place in outcome.turns:
            names.setdefault(place, []).append(name)
    return {place: names[place] for file in files() for place in awaits(file) if place in names}


def test_every_await_of_the_controller_is_reached(reached):
    every = [place for file in files() for place in awaits(file)]
    # An `async with` is reached where its beginning or its end waits, which most never do.
    must = [place for place in every if not place.code.startswith(("async with", "async for"))]
    missed = [place for place in must if place not in reached]
    unknown = [place for place in missed if not any(part in place.code for part in ELSEWHERE)]
    assert not unknown, "no scenario waits in\n" + "\n".join(map(str, unknown))
    unused = [part for part in ELSEWHERE if not any(part in place.code for place in missed)]
    unused += [file for file in OTHERS if not awaits(file)]
    assert not unused
    print(f"{len(reached)} awaits of {len(files())} files are reached; {len(missed)} are not, see ELSEWHERE")


def _cases(reached, undisturbed):
    """Each await with each event, each time in another of the scenarios that reach it."""
    number = 0
    for place, names in reached.items():
        for what in EVENTS:
            meshes = {mesh.split("-")[0] for name in names for mesh in undisturbed[name].world.meshes}
            if (role := what.split()[0]) not in (*meshes, "interrupt", "prompt"):
                continue
            has = [
                name
                for name in names
                if role in ("interrupt", "prompt")
                or role in {mesh.split("-")[0] for mesh in undisturbed[name].world.meshes}
            ]
            yield has[number % len(has)], place, what
            number += 1


def _check_all(cases, undisturbed, directory):
    failed = []
    for number, (name, place, what) in enumerate(cases):
        try:
            check(SCENARIOS[name], place, what, directory / str(number), undisturbed[name])
        except AssertionError as error:
            failed.append(f"{what} | {name} | {place} | {error!r:.300}")
        shutil.rmtree(directory / str(number), ignore_errors=True)
    assert not failed, f"{len(failed)} of {len(cases)}:\n" + "\n".join(failed)


def test_whatever_happens_at_an_await_the_run_ends(reached, undisturbed, tmp_path):
    """Each await with a few of the events, other ones at each; all of them: the slow test below."""
    cases = list(_cases(reached, undisturbed))
    _check_all(cases[::29], undisturbed, tmp_path)


@pytest.mark.slow
def test_whatever_happens_at_any_await_the_run_ends(reached, undisturbed, tmp_path):
    _check_all(list(_cases(reached, undisturbed)), undisturbed, tmp_path)
