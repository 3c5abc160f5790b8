"""The simulation of runs: its clock, what is shared, what is sent, against times worked by hand; and whole runs by a seed."""

# holds: exact, times of a clock that is made up

import asyncio
import math
from dataclasses import replace

import pytest

from benchmarks.simulation.clock import SimulatedLoop
from benchmarks.simulation.probe import longest_demonstration
from benchmarks.simulation.processes import Remote, Trainer
from benchmarks.simulation.seconds import Controls, Device, Machine, Overheads, Work
from benchmarks.simulation.shares import Shared
from benchmarks.simulation.workloads import (
    STEPS,
    cases,
    cpu_hosts,
    gpu_hosts,
    with_gpus,
    without_pauses,
    workload,
)
from benchmarks.simulation.world import Options, Workload, World, simulate
from configs.quickstart import quickstart
from rl.actors.remote import ProcessDied
from rl.config import RewardConfig
from rl.config.settle import settle
from rl.models.layout import Layout
from rl.models.tokenizer import HFTokenizer
from rl.plan.cluster import Cluster, Host
from rl.plan.model_shape import ModelShape

DEVICE = Device({"float32": {1: 1e11}, "bfloat16": {1: 2e11}}, 1e10, 1e-6)
HERE = Machine(
    {1: DEVICE, 2: DEVICE},
    Overheads(train=0.05, optim=0.01, decode=0.004, sequence=1e-5, publish=0.03, load=0.02, reward=0.01),
    Controls(call=0.0, byte=0.0, latency=0.0),
    link=1e6,
)
WORK = Workload([8, 12], prompt_tokens=10)
BY_SEED = Options(speed=0.0)


def run(main):
    """What the coroutine function returns, in a loop that computes in no time."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(0.0)) as runner:
        return runner.run(main())


async def ends(*jobs):
    """When each ends."""
    loop = asyncio.get_running_loop()

    async def end(job):
        await job
        return loop.time()

    return await asyncio.gather(*map(end, jobs))


def test_jobs_share_a_rate_and_the_rest_is_faster_once_one_has_ended():
    async def main():
        link = Shared(asyncio.get_running_loop(), lambda n: 100 / n)

        async def later():
            await asyncio.sleep(1.0)
            await link.use(100)

        took = await ends(link.use(100), link.use(300), later())
        return took, link.busy, link.done

    # To 1 s each of two has 50. Then three have 33.3 a second each: the first's other 50 take 1.5 s. Then two
    # have 50: the late one lacks 50, 1 s more; the second had 50 + 50 + 50, and 150 alone take 1.5 s.
    took, busy, done = run(main)
    assert took == pytest.approx([2.5, 5.0, 3.5])
    assert busy == pytest.approx(5.0) and done == 500


def test_a_limit_lets_the_oldest_in_first_and_a_pause_holds_up_all():
    async def main():
        steps = Shared(asyncio.get_running_loop(), lambda n: 1.0, limit=1)

        async def pause():
            await asyncio.sleep(0.5)
            steps.pause(2.0)
            await asyncio.sleep(0.5)
            steps.pause(1.0)

        return await ends(steps.use(1), steps.use(2), pause())

    assert run(main)[:2] == pytest.approx([4.0, 6.0])


@pytest.mark.parametrize("limit", [None, 1])
def test_what_is_given_up_makes_room(limit):
    async def main():
        link = Shared(asyncio.get_running_loop(), lambda n: 10 / n, limit)
        tasks = [asyncio.ensure_future(link.use(100)) for _ in range(4)]

        async def give_up():
            await asyncio.sleep(1.0)
            for task in tasks[:2]:  # in one turn of the loop
                task.cancel()
            await asyncio.wait(tasks[:2])

        first = await ends(give_up(), *tasks[2:])
        return first, await ends(link.use(10))

    shared, alone = run(main)
    # Without a limit: 2.5 of each in the first second, then 5 a second. With it: 10 s each, after the first's second.
    assert shared[1:] == pytest.approx([1 + (100 - 2.5) / 5] * 2 if limit is None else [11.0, 21.0])
    assert alone[0] - max(shared) == pytest.approx(1.0)


def test_the_clock_runs_while_the_controller_computes_and_not_while_the_simulation_does():
    def work():
        return sum(math.sqrt(i) for i in range(300_000))

    async def main():
        loop = asyncio.get_running_loop()
        began = loop.time()
        work()
        between = loop.time()
        with loop.spare(), loop.spare():
            work()
        spared = loop.time()
        loop.charge(3.0)
        return between - began, spared - between, loop.time() - spared, loop.busy

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        own, simulations, charged, busy = runner.run(main())
    assert own > 4 * simulations and charged >= 3.0 and busy > own + 3.0
    assert run(main) == (0.0, 0.0, 0.0, 0.0)


def world(config, cluster, options=BY_SEED):
    plan = settle(config, cluster=cluster)
    return World(plan, config.model.config(), HERE, WORK, options)


def hosts(count):
    return Cluster((Host(2, 24.0),) * count)


@pytest.mark.parametrize(
    ("options", "in_units"),
    [
        # Each of seven has a seventh of the one link.
        (BY_SEED, [7.0] * 7),
        # The first two share the link of the one that has it. Of the five that are left one has a sender alone.
        (replace(BY_SEED, tree=True), [2, 2, 3, 4, 4, 4, 4]),
        (replace(BY_SEED, delta=0.1), [0.7] * 7),
    ],
)
def test_versions_come_to_hosts_by_links(options, in_units):
    config = replace(quickstart(), reward=RewardConfig(num_procs=1))

    async def main():
        there = world(config, hosts(8), options)
        processes = [Remote(f"generator-{host}", there, [host]) for host in range(8)]
        for version in range(options.delta == 1, 2):  # what changed is sent to who has the version before
            there.published(version, [0])
            began = there.loop.time()
            twice = [there.fetch(process, version) for process in processes[1:] for _ in range(2)]
            took = [end - began for end in await ends(*twice)]
        later = await ends(*(there.fetch(process, 1) for process in processes))
        assert later == [there.loop.time()] * 8  # who has it fetches nothing
        return sorted(took)[::2], there.up, there.down

    took, up, down = run(main)
    unit = 4 * ModelShape.of(config.model.config()).num_parameters / HERE.link
    assert took == pytest.approx([unit * seconds for seconds in in_units])
    size = unit * HERE.link * (1 if options.delta == 1 else 1 + options.delta)
    assert [each.done for each in down] == pytest.approx([0] + [size] * 7)
    assert sum(each.done for each in up) == pytest.approx(7 * size)


def test_a_host_with_shards_lacks_those_of_the_others():
    async def main():
        there = world(quickstart(), hosts(4))
        there.published(1, [0, 1])
        await asyncio.gather(*(there.fetch(Remote("generator", there, [host]), 1) for host in (0, 3)))
        return [each.done for each in there.up], [each.done for each in there.down]

    size = 4 * ModelShape.of(quickstart().model.config()).num_parameters
    sent, received = run(main)
    assert sent == pytest.approx([size / 2, size, 0, 0]) and received == pytest.approx([size / 2, 0, 0, size])


@pytest.mark.parametrize(
    ("layout", "num_hosts", "learns", "scores"),
    [
        (
            Layout(shard=2),
            2,
            3 * (4 + 4 + 4) / 2,
            3 * 4 / 2,
        ),  # gathered twice and reduced, for each of three rows
        (Layout(replicate=2), 2, 3 * 2 * 4 / 2, 0),  # added up for each row
        (Layout(replicate=2, shard=2), 2, 3 * 2 * 4 / 2, 0),  # each copy on a host of its own
        (
            Layout(replicate=2, shard=2),
            4,
            3 * ((4 + 4 + 4) / 2 + 2 * 4 / 2 / 2),
            3 * 4 / 2,
        ),  # over two hosts each
    ],
)
def test_a_trainers_collectives_go_over_its_links(layout, num_hosts, learns, scores):
    base = quickstart()
    placed = tuple(range(num_hosts))
    config = replace(base, trainer=replace(base.trainer, layout=layout, hosts=placed))

    async def main():
        there = world(config, hosts(num_hosts))
        (replica,) = there.plan.of("trainer")
        ranks = [process.host for process in replica.processes]
        others = replica.spec.config, there.plan.deadlines, there.timeline
        trainer = Trainer(there, ranks, lambda rank: None, *others)
        rows = {"forward_backward": 3, "forward": 3, "optim_step": 0}
        return trainer.hosts_of_weights, [there.between_hosts(trainer, *each) for each in rows.items()]

    of_weights, seconds = run(main)
    parameters = ModelShape.of(base.model.config()).num_parameters
    assert seconds == pytest.approx([learns * parameters / 1e6, scores * parameters / 1e6, 0])
    assert len({*of_weights}) == num_hosts // layout.replicate  # one copy publishes


def test_what_a_lost_host_had_and_sent_is_lost():
    """Its version is fetched again, and from others; who waits for it hears of its end."""
    config = replace(quickstart(), reward=RewardConfig(num_procs=1))

    async def main():
        there = world(config, hosts(4), replace(BY_SEED, failures_per_hour=3.6e6, failing=(1,)))
        processes = [Remote(f"generator-{host}", there, [host]) for host in range(4)]
        there.published(1, [0])
        await there.fetch(processes[1], 1)
        there.comes(processes[1])
        fail = asyncio.ensure_future(there.fail())
        with pytest.raises(ProcessDied, match="its host is lost"):
            await processes[1].sleep(1e3)
        before = there.down[1].done
        again = Remote("generator-1", there, [1])
        await there.fetch(again, 1)
        fail.cancel()
        return before, there.down[1].done

    before, after = run(main)
    assert after == 2 * before > 0


def test_seconds_follow_from_sizes():
    shape = ModelShape(
        dim=10, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=5, hidden_dim=20, vocab_size=50, tied=True,
        qk_norm=False,
    )  # fmt: skip
    nothing = Overheads(0, 0, 0, 0, 0, 0, 0)
    work = Work(shape, "float32", Device({"float32": {1: 1e3}}, math.inf, 0.0), nothing)
    of_layers = 2 * (10 * 5 * (2 * 2 + 2) + 3 * 10 * 20)
    assert work.train(7, 0, 0) == pytest.approx(3 * 2 * of_layers * 7 / 1e3)
    assert work.train(0, 3, 0) == pytest.approx(3 * 2 * 10 * 50 * 3 / 1e3)
    assert work.train(0, 0, 11) == pytest.approx(3 * 4 * 10 * 2 * 11 / 1e3)
    assert work.train(7, 3, 11, learns=False) == pytest.approx(work.train(7, 3, 11) / 3)
    assert work.decode(4) == pytest.approx(4 * 2 * (of_layers + 500) / 1e3)
    slow = replace(work, device=Device({"float32": {1: math.inf}}, 1e3, 0.0))
    parameters = shape.num_parameters
    assert slow.optim(2) == pytest.approx(parameters * 4 * 9 / 2 / 1e3)
    assert slow.publish(1) == pytest.approx(parameters * 8 / 1e3)
    assert slow.load() == pytest.approx(parameters * 4 * 6 / 1e3)
    assert slow.decode(0) == pytest.approx(parameters * 4 / 1e3)
    few = replace(work, device=Device({"float32": {2: 1e2, 16: 1e3}}, math.inf, 0.0, random=0.5))
    assert few.prefill(15) == pytest.approx(2 * of_layers * 15 / 1e2)
    assert few.prefill(16) == pytest.approx(2 * of_layers * 16 / 1e3)
    assert few.decode(1) == pytest.approx(2 * (of_layers + 500) / 1e2 + 50 * 0.5)
    split = replace(work, parts=2)
    assert split.train(7, 3, 11) == pytest.approx(work.train(7, 3, 11) / 2)


def test_a_run_takes_what_its_parts_take():
    """Quickstart without times of messages: generate, reward, train and publish follow one another."""
    config = without_pauses(quickstart(), steps=3)
    outcome = simulate(config, hosts(1), HERE, Workload([10]), BY_SEED)
    work = Work(ModelShape.of(config.model.config()), "float32", DEVICE, HERE.overheads, context=5)
    generate = 10 * work.decode(512)
    for step in outcome.steps:
        assert step["time/reward"] == pytest.approx(64 * HERE.overheads.reward)  # by one worker
        assert step["time/generate"] == pytest.approx(generate, rel=0.1)  # and prompts, one after the other
        assert step["time/sync_blocking"] == pytest.approx(work.publish(1))
        rows = math.ceil(step["tokens/computed"] / config.trainer.micro_batch_tokens)
        most = work.train(step["tokens/computed"], 5120, 64 * 8 * 30**2) + rows * 0.1 + work.optim(1)
        assert work.optim(1) + HERE.overheads.train < step["time/train"] < most
    assert len(outcome.steps) == 3 and outcome.sent == outcome.received == [0.0]
    assert outcome.controller == 0.0 and set(outcome.lags) == {0.0}
    steady, second = outcome.steady(1, HERE.link), outcome.steps[1]
    assert steady.step == pytest.approx(second["time/step"])
    assert steady.generators == pytest.approx(second["time/generate"] / second["time/step"], rel=0.05)
    assert steady.trainer == pytest.approx(1 - second["idle/trainer"] / second["time/step"])
    assert steady.controller == steady.links == 0.0


def test_a_share_of_answers_is_as_long_as_may_be(tmp_path):
    config = quickstart()
    tokenizer = HFTokenizer(config.model.materialize(tmp_path))
    whole, cut = (workload(config, tokenizer, share).lengths for share in (0.0, 0.02))
    limit = config.env.max_new_tokens
    assert max(whole) == longest_demonstration() == limit - 1
    assert cut.count(limit) == len(cut) // 50 and len(cut) == len(whole)


def test_a_seed_decides_a_run_and_its_failures():
    config, cluster = cpu_hosts(8, 6, quickstart)
    trainer, generator = (replace(each, max_restarts=99) for each in (config.trainer, config.generator))
    config = replace(
        config, trainer=trainer, generator=generator, save_every=2, prompts_per_step=12, group_size=2
    )
    controls = replace(HERE.controls, start=0.05, detect=0.02, repair=0.1)
    fast = replace(HERE, link=1e9, controls=controls)
    whole = simulate(config, cluster, fast, WORK, BY_SEED)
    failing = replace(BY_SEED, failures_per_hour=3600 / whole.seconds * 3, failing=(1,), seed=1)
    first, again = (simulate(config, cluster, fast, WORK, failing) for _ in range(2))
    assert first == again
    assert (
        [step["number"] for step in first.steps] == [step["number"] for step in whole.steps] == [*range(1, 7)]
    )
    assert 0 < first.restarts <= first.num_failures and whole.restarts == 0
    least = first.restarts * (controls.repair + controls.start)
    assert first.seconds > whole.seconds + least
    lost = replace(failing, failing=tuple(range(2, 8)))
    assert simulate(config, cluster, fast, WORK, lost).restarts == 0


def test_every_workload_can_be_planned():
    machine = with_gpus(HERE, 5e10)
    for case in cases(["quickstart"]):  # SmolLM2 is not there everywhere
        assert (
            settle(case.config, cluster=case.cluster).of("generator")[0].processes[0].host
            == case.num_hosts - 1
        )
        assert case.config.steps == STEPS
    outcome = simulate(*gpu_hosts(4, 1), machine, Workload([64]), BY_SEED)
    assert len(outcome.steps) == 1 and outcome.trainer_busy > 0 and max(outcome.sent) > 0
