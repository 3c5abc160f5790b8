"""What one tenant's requests do to the engines, and what that costs it and nobody else."""

# holds: exact, the fake backend counts in float64

import asyncio
import gc
import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tinker.proto.response_conv import deserialize_sample_response

from rl.tinker.backend import NotFound, UserError
from rl.tinker.blame import Blame
from rl.tinker.sampling_queue import Load
from tests.tinker.lives import save

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.errors import NotFinite, RunError
from rl.tinker.backend import GeneratorsDied, ModelsLost
from rl.tinker.database import Database, requests
from rl.tinker.history import last_number
from rl.tinker.limits import Limits
from rl.tinker.requests import TooMany
from tests.tinker.databases import url_of
from tests.tinker.fakes import NAME, FakeBackend
from tests.tinker.lives import ADAM, ME, answered, living, make_model, train, value_of
from tests.tinker.test_protocol import request_body
from tests.tinker.test_quotas import SAMPLE

OTHER = "other"
KILLS, FAILS, BREAKS = 17, 18, 19  # tokens of data that do this to the engine, or to its model


class Mortal(FakeBackend):
    """Some data kill it, others fail; both drop the model's gradient, as engines do."""

    def __init__(self):
        super().__init__()
        self.num_deaths = 0

    async def forward_backward(self, model, data, loss, config, forward_only):
        if any(KILLS in datum.tokens for datum in data):
            self.num_deaths += 1
            self.models.clear()
            raise ModelsLost("the engine died")
        if any(FAILS in datum.tokens for datum in data):
            self.models[model]["gradient"] = 0.0
            raise NotFinite("the loss is inf", "loss")
        if any(BREAKS in datum.tokens for datum in data):
            self.models[model]["value"] += 100
            raise RunError("out of memory in the middle")
        return await super().forward_backward(model, data, loss, config, forward_only)


async def models_of_both(service):
    """A model of ME, and one of OTHER."""
    mine = await make_model(service, service.create_session(ME, None, None))
    return mine, await make_model(service, service.create_session(OTHER, None, None), tenant=OTHER)


def submit(service, model, seq_id, first_token=1, tenant=ME):
    body = request_body(model, seq_id, tokens=(first_token, 2, 3))
    return service.submit(tenant, "forward_backward", model, seq_id, body)


def message_of(row):
    return row.result.decode()


def test_a_request_that_kills_the_engine_fails_with_its_reason_and_never_comes_back(tmp_path):
    async def main():
        backend = Mortal()
        async with living(tmp_path / "a", backend=backend) as service:
            mine, other = await models_of_both(service)
            await train(service, mine, 1)
            await train(service, other, 1, OTHER)
            row = await answered(service, submit(service, mine, 3, KILLS), state="failed")
            assert "died 2 times while this forward_backward ran" in message_of(row)
            assert backend.num_deaths == 2
            await train(service, mine, 5)
            await train(service, other, 3, OTHER)
            assert backend.num_deaths == 2
            assert await value_of(service, mine, 7) == pytest.approx(0.6)
            assert await value_of(service, other, 5, OTHER) == pytest.approx(0.6)
        backend = Mortal()
        async with living(tmp_path / "a", backend=backend) as service:  # nor after a restart
            assert await value_of(service, mine, 8) == pytest.approx(0.6)
            assert not backend.num_deaths

    asyncio.run(main())


def test_a_forward_that_kills_the_engine_leaves_the_gradient_and_says_nothing_of_it(tmp_path):
    async def main():
        async with living(tmp_path / "a", backend=Mortal()) as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            await answered(service, submit(service, mine, 1))
            body = request_body(mine, 2, tokens=(KILLS, 2, 3))
            row = await answered(service, service.submit(ME, "forward", mine, 2, body), state="failed")
            assert "died 2 times while this forward ran" in message_of(row)
            assert "gradient" not in message_of(row)
            await answered(service, service.optim_step(ME, mine, 3, ADAM))
            assert await value_of(service, mine, 4) == pytest.approx(0.3)
            row = await answered(service, submit(service, mine, 5, KILLS), state="failed")
            assert "the model's gradient is gone" in message_of(row)

    asyncio.run(main())


def test_a_step_without_a_gradient_changes_nothing_unless_one_failed(tmp_path):
    """tinker-cookbook's streamed minibatches take such a step where all groups have constant rewards."""

    async def main():
        async with living(tmp_path / "a", backend=Mortal()) as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            row = await answered(service, service.optim_step(ME, mine, 1, ADAM))
            assert json.loads(row.result) == {"metrics": {"grad_norm:mean": 0.0}}
            await train(service, mine, 2)
            await answered(service, service.optim_step(ME, mine, 4, ADAM))
            assert await value_of(service, mine, 5) == pytest.approx(0.3)
            for token, state in ((FAILS, "failed"), (13, "refused")):
                await answered(service, submit(service, mine, 10 + token, token), state=state)
                request = service.optim_step(ME, mine, 40 + token, ADAM)
                row = await answered(service, request, state="refused")
                assert "without a gradient: the forward_backward before it failed" in message_of(row)
        async with living(tmp_path / "a") as service:
            await train(service, mine, 70)
            assert await value_of(service, mine, 80) == pytest.approx(0.6)

    asyncio.run(main())


def test_a_step_that_changed_nothing_is_not_repeated_by_what_came_before_it(tmp_path):
    """Refused requests are forgotten after a day: then the failed one seems to come right before the step."""

    async def main():
        async with living(tmp_path / "a", backend=Mortal()) as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            await answered(service, submit(service, mine, 1, FAILS), state="failed")
            await answered(service, service.optim_step(ME, mine, 2, ADAM), state="refused")
            await answered(service, service.optim_step(ME, mine, 3, ADAM))
            service.database.delete(requests, requests.c.state == "refused")
        async with living(tmp_path / "a") as service:
            await train(service, mine, 4)
            assert await value_of(service, mine, 6) == pytest.approx(0.3)

    asyncio.run(main())


def test_a_request_that_is_refused_as_it_comes_is_not_the_last_that_was_carried_out(tmp_path):
    """A snapshot after it would leave out what waits: acknowledged steps, later."""

    async def main():
        async with living(tmp_path / "a") as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            await train(service, mine, 1)
            before = last_number(service.database, mine)
            service.backend.delay = 0.2
            waiting = submit(service, mine, 3)
            service.quotas._most_bytes = 0
            refused = submit(service, mine, 4)
            await answered(service, refused, state="refused")
            assert last_number(service.database, mine) == before
            await answered(service, waiting)
            assert last_number(service.database, mine) > before

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(25))
def test_whatever_fails_and_dies_a_model_is_what_was_acknowledged(tmp_path, seed):
    """Against a reference: an optim_step applies the gradient since the last failure. Restarts at any time."""
    rng = random.Random(seed)
    value, gradient, seq_id, is_lost = 0.0, 0, 0, False

    async def life(model):
        nonlocal value, gradient, seq_id, is_lost
        limits = Limits(snapshot_every=3, max_models=2, max_deaths=1000)
        async with living(tmp_path / "a", limits, Mortal()) as service:
            model = model or await make_model(service, service.create_session(ME, None, None))
            session = service.create_session(OTHER, None, None)
            for i in range(rng.randrange(12)):
                seq_id += 1
                acts = ("gradient", "gradient", "step", "kill", "fail", "break", "refused", "other")
                act = rng.choice(acts)
                if act in ("kill", "fail", "break", "refused"):
                    is_lost = True
                match act:
                    case "gradient":
                        await answered(service, submit(service, model, seq_id))
                        gradient += 1
                    case "step":  # without a gradient it changes nothing
                        state = "refused" if is_lost and not gradient else "done"
                        is_lost = False
                        await answered(service, service.optim_step(ME, model, seq_id, ADAM), state=state)
                        value, gradient = value + 0.3 * gradient, 0
                    case "kill":
                        await answered(service, submit(service, model, seq_id, KILLS), state="failed")
                        gradient = 0
                    case "fail":
                        await answered(service, submit(service, model, seq_id, FAILS), state="failed")
                        gradient = 0
                    case "break":
                        await answered(service, submit(service, model, seq_id, BREAKS), state="failed")
                        gradient = 0
                    case "refused":
                        await answered(service, submit(service, model, seq_id, 13), state="refused")
                    case "other":  # takes this one's place in the engine
                        await make_model(service, session, i, OTHER)
            seq_id += 1
            assert await value_of(service, model, seq_id) == pytest.approx(value)
        return model

    async def main():
        model = None
        for _ in range(5):
            model = await life(model)

    asyncio.run(main())


class Hanging(FakeBackend):
    """A server that dies has not answered."""

    async def forward_backward(self, *arguments):
        await asyncio.Event().wait()


def test_a_request_with_which_the_server_died_twice_is_not_tried_again(tmp_path):
    async def main():
        async with living(tmp_path / "a") as service:
            model = await make_model(service, service.create_session(ME, None, None))

        async def die_with(seq_id, in_order):
            database = Database(url_of(tmp_path / "a"))
            async with living(tmp_path / "a", backend=Hanging(), database=database) as service:
                submit(service, model, seq_id)
                await asyncio.sleep(0.05)
                if not in_order:
                    service.queue.stop = lambda: None  # as where the process is killed

        for _ in range(4):
            await die_with(1, in_order=True)
        async with living(tmp_path / "a") as service:
            await answered(service, f"{model}:1")
        for _ in range(2):
            await die_with(2, in_order=False)
        async with living(tmp_path / "a") as service:
            row = await answered(service, f"{model}:2", state="failed")
            assert "the server died 2 times while this forward_backward ran" in message_of(row)
            await train(service, model, 3)

    asyncio.run(main())


def test_a_tenant_that_keeps_killing_engines_has_to_wait_and_others_do_not(tmp_path):
    async def main():
        backend = Mortal()
        async with living(tmp_path / "a", Limits(max_deaths=4), backend) as service:
            mine, other = await models_of_both(service)
            waiting = [submit(service, mine, i, KILLS) for i in range(1, 20)]
            rows = [await service.queue.wait(id, ME, 30) for id in waiting]
            assert [row.state for row in rows] == ["failed"] * 2 + ["refused"] * 17
            assert "limits.max_deaths is 4: the next is taken in 60 minutes" in message_of(rows[-1])
            assert backend.num_deaths == 4
            row = await answered(service, submit(service, mine, 30), state="refused")
            assert "ended an engine of this server 4 times" in message_of(row)
            await train(service, other, 1, OTHER)
            assert await value_of(service, mine, 40) == 0.0  # what was learned can be saved

    asyncio.run(main())


def asked(num_samples, token=1, max_tokens=3):
    return {
        "num_samples": num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [token]}]},
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "seed": 1,
        },
    }


class Sampler(FakeBackend):
    """Samples until it is told; notes what runs, and kills generators with some prompts."""

    def __init__(self, is_open=True):
        super().__init__()
        self.gate, self.running, self.most, self.num_deaths = asyncio.Event(), Counter(), 0, Counter()
        self.ended = []
        if is_open:
            self.gate.set()

    async def sample(self, adapter, prompt, n, params, max_deaths=3):
        token = prompt[0]
        self.running[token] += n
        self.most = max(self.most, self.running.total())
        try:
            await self.gate.wait()
            if token == KILLS:
                self.num_deaths[max_deaths] += max_deaths
                raise GeneratorsDied("it died")
            return await super().sample(adapter, prompt, n, params)
        except asyncio.CancelledError:
            self.ended.append(token)
            raise
        finally:
            self.running[token] -= n


async def sampler_of(service, tenant=ME):
    session = service.create_session(tenant, None, None)
    return service.create_sampler(tenant, session, 0, NAME, None)


def test_a_request_that_kills_generators_is_tried_alone_and_fails(tmp_path):
    async def main():
        backend = Sampler()
        async with living(tmp_path / "a", backend=backend) as service:
            sampler = await sampler_of(service)
            row = await answered(service, service.sample(ME, sampler, 1, asked(1, KILLS)), state="failed")
            assert "generators died 3 times while this request ran" in message_of(row)
            assert backend.num_deaths == {2: 2, 1: 1}
            await answered(service, service.sample(ME, sampler, 2, asked(1)))

    asyncio.run(main())


@pytest.mark.parametrize("is_running", [True, False])
def test_a_request_that_is_cancelled_ends_in_the_generator_and_counts_once(tmp_path, is_running):
    async def main():
        backend = Sampler(is_open=False)
        async with living(tmp_path / "a", backend=backend) as service:
            sampler = await sampler_of(service)
            first = service.sample(ME, sampler, 1, asked(256))
            ids = [service.sample(ME, sampler, i, asked(1)) for i in range(2, 5)]
            await asyncio.sleep(0.05)
            cancelled = first if is_running else ids[1]
            for _ in range(3):
                service.cancel(ME, cancelled)
                await asyncio.sleep(0)
            row = await answered(service, cancelled, state="failed")
            assert "cancelled" in message_of(row)
            assert service.queue.waiting() == {ME: 3}
            assert bool(backend.ended) == is_running
            backend.gate.set()
            for id in {first, *ids} - {cancelled}:
                await answered(service, id)
            assert service.queue.waiting() == {}
            service.cancel(ME, first)
            assert service.queue.waiting() == {}
            assert not backend.running.total()

    asyncio.run(main())


def test_samples_of_a_request_that_runs_in_parts_are_those_of_one_call(tmp_path):
    async def main():
        async with living(tmp_path / "a", backend=Sampler()) as service:
            body = asked(50)
            completions = await service.sampling.sample(ME, None, body)
            assert [c.tokens[0] for c in completions] == [1 + i for i in range(50)]

    asyncio.run(main())


def test_waiting_samples_of_a_tenant_are_bounded_on_every_route(tmp_path):
    async def main():
        backend = Sampler(is_open=False)
        async with living(tmp_path / "a", Limits(max_waiting_samples=300, max_waiting=8), backend) as service:
            sampler = await sampler_of(service)
            now = [asyncio.create_task(service.sampling.sample(ME, None, asked(100))) for _ in range(2)]
            await asyncio.sleep(0)
            service.sample(ME, sampler, 1, asked(90))
            with pytest.raises(TooMany, match="3 requests for 290 samples are waiting already"):
                service.sample(ME, sampler, 2, asked(11))
            with pytest.raises(TooMany):
                await service.sampling.sample(ME, None, asked(11))
            for i in range(3, 8):
                service.sample(ME, sampler, i, asked(1))
            with pytest.raises(TooMany):
                await service.sampling.sample(ME, None, asked(1))
            other = service.sample(OTHER, await sampler_of(service, OTHER), 1, asked(11))
            for task in now:
                task.cancel()
            await asyncio.wait(now)
            service.sample(ME, sampler, 20, asked(100))
            backend.gate.set()
            await answered(service, other, OTHER)

    asyncio.run(main())


def test_a_flood_of_samples_leaves_room_for_another_tenants(tmp_path):
    """The generators never hold more than their capacity; the other's runs while the flood waits."""

    async def main():
        backend = Sampler(is_open=False)
        async with living(tmp_path / "a", backend=backend) as service:
            sampler = await sampler_of(service)
            for i in range(1, 200):
                service.sample(ME, sampler, i, asked(256))
            await asyncio.sleep(0.05)
            assert backend.running[1] == backend.most == 256
            other = await sampler_of(service, OTHER)
            for i in range(1, 5):
                service.sample(OTHER, other, i, asked(2, token=2))
            await asyncio.sleep(0.05)
            assert backend.running[2] == 8
            backend.gate.set()

    asyncio.run(main())


def test_tenants_get_equal_shares_of_the_training_engine_however_many_models_they_have(tmp_path):
    async def main():
        backend = FakeBackend()
        async with living(tmp_path / "a", Limits(max_models=30), backend) as service:
            session = service.create_session(ME, None, None)
            mine = [await make_model(service, session, i) for i in range(20)]
            other = await make_model(service, service.create_session(OTHER, None, None), tenant=OTHER)
            backend.delay = 0.002
            for model in mine:
                for seq_id in range(1, 6):
                    submit(service, model, seq_id)
            begun = len(backend.log)
            await asyncio.sleep(0.02)
            for seq_id in range(1, 11):
                last = submit(service, other, seq_id, tenant=OTHER)
            await answered(service, last, OTHER)
            beside = [model for _, model in backend.log[begun:] if model != other]
            assert len(beside) < 45, "the ten requests of the other waited for more than a few of a hundred"

    asyncio.run(main())


def test_bodies_wait_in_the_database_alone(tmp_path):
    async def main():
        async with living(tmp_path / "a", backend=Hanging()) as service:
            model = await make_model(service, service.create_session(ME, None, None))
            submit(service, model, 1)
            rows = [
                service.queue.submit(f"{model}:{i}", ME, "forward_backward", model, b"x")[0] for i in (2, 3)
            ]
            rows += service.queue.unfinished()
            assert all(not hasattr(row, "body") and not hasattr(row, "result") for row in rows)
            assert service.database.count(requests, requests.c.body.is_not(None)) >= 3

    asyncio.run(main())


def test_who_polls_holds_no_body_and_a_list_of_ends_holds_no_result(tmp_path):
    """A tenant may poll for one request of 64 MiB many times at once, and list a thousand large results."""

    async def main():
        async with living(tmp_path / "a", backend=Hanging()) as service:
            session = service.create_session(ME, None, None)
            model = await make_model(service, session)
            waiting = await service.queue.wait(submit(service, model, 1), ME, 0.01)
            assert waiting.state == "waiting"
            assert not hasattr(waiting, "body") and not hasattr(waiting, "result")
            ((_, ended),) = await service.queue.ended_after(model, 0, 0)
            assert ended.size > 0 and not hasattr(ended, "body") and not hasattr(ended, "result")
            answer = await service.queue.wait(ended.id, ME, 0)
            assert len(answer.result) == ended.size and not hasattr(answer, "body")

    asyncio.run(main())


def test_a_tenant_with_many_models_sends_its_own_out_of_the_engine(tmp_path):
    """Else each request of another would wait for a model of the first to be saved, and its own to be loaded."""

    async def main():
        async with living(tmp_path / "a", Limits(max_models=2)) as service:
            backend = service.backend
            session, other = (service.create_session(tenant, None, None) for tenant in (ME, OTHER))
            theirs = await make_model(service, other, tenant=OTHER)
            mine = [await make_model(service, session, i) for i in range(3)]
            begun = len(backend.log)
            for seq_id in range(1, 7, 2):
                for model in mine:
                    await train(service, model, seq_id)
                await train(service, theirs, seq_id, OTHER)
            moved = {model for verb, model in backend.log[begun:] if verb in ("remove", "load")}
            assert moved and theirs not in moved

    asyncio.run(main())


def test_a_model_that_cannot_be_saved_makes_room_for_another_tenants(tmp_path):
    """The disk is full: nothing of it is lost, since its requests are kept."""

    class Full(FakeBackend):
        full = False

        async def save(self, model, directory, optimizer):
            if self.full:
                raise OSError("no space left on device")
            await super().save(model, directory, optimizer)

    async def main():
        async with living(tmp_path / "a", Limits(max_models=1), Full()) as service:
            session, other = (service.create_session(tenant, None, None) for tenant in (ME, OTHER))
            mine = await make_model(service, session)
            await train(service, mine, 1)
            service.backend.full = True
            theirs = await make_model(service, other, tenant=OTHER)
            await train(service, theirs, 1, OTHER)
            service.backend.full = False
            assert await value_of(service, mine, 9) == pytest.approx(0.3)

    asyncio.run(main())


def test_tenants_share_no_cached_prefix_on_any_route(tmp_path):
    """`prompt_cache_hit_tokens`, and the time, would tell one what another has asked."""

    class Noting(FakeBackend):
        async def sample(self, adapter, prompt, n, params, max_deaths=3):
            groups.append(params.cache_group)
            return await super().sample(adapter, prompt, n, params, max_deaths)

    groups = []

    async def main():
        async with living(tmp_path / "a", backend=Noting()) as service:
            for tenant in (ME, OTHER):
                sampler = service.create_sampler(
                    tenant, service.create_session(tenant, None, None), 0, NAME, None
                )
                asked = SAMPLE | {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}
                scored = asked | {"prompt_alt_tokens_k": 1}
                await answered(service, service.sample(tenant, sampler, 1, scored), tenant)
                await service.sampling.sample(tenant, None, asked)

    asyncio.run(main())
    assert groups == [ME] * 3 + [OTHER] * 3


@pytest.mark.parametrize("asked", ["target_prompt_logprobs", "prompt_alt_tokens_k"])
def test_a_request_that_has_failed_samples_nothing_more(tmp_path, asked):
    class Failing(FakeBackend):
        num_calls = 0

        async def sample(self, adapter, prompt, n, params, max_deaths=3):
            self.num_calls += 1
            if self.num_calls == 3:
                raise RunError("vLLM refused a request")
            await asyncio.sleep(0.02)
            return await super().sample(adapter, prompt, n, params, max_deaths)

    backend = Failing()
    targets = {"data": [2] * 480, "dtype": "int64", "shape": [40, 12]}
    body = {
        "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 41}]},
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        asked: targets if asked == "target_prompt_logprobs" else 20,
    }  # fmt: skip

    async def main():
        async with living(tmp_path / "server", backend=backend) as service:
            sampler = service.create_sampler(ME, service.create_session(ME, None, {}), 0, NAME, None)
            failed = await answered(service, service.sample(ME, sampler, 1, body), ME, "failed")
            assert b"vLLM refused a request" in failed.result
            num_calls = backend.num_calls
            await asyncio.sleep(0.2)
            assert backend.num_calls == num_calls

    asyncio.run(main())


def test_tenants_share_no_cached_prefixes(tmp_path):
    """Else one could tell from the time of an answer what another has asked."""
    groups = []

    class Noting(Sampler):
        async def sample(self, adapter, prompt, n, params, max_deaths=3):
            groups.append((prompt[0], params.cache_group))
            return await super().sample(adapter, prompt, n, params, max_deaths)

    async def main():
        async with living(tmp_path / "a", backend=Noting()) as service:
            for tenant, token in ((ME, 1), (OTHER, 2), (ME, 3)):
                sampler = await sampler_of(service, tenant)
                await answered(service, service.sample(tenant, sampler, 1, asked(1, token)), tenant)
            await service.sampling.sample(OTHER, None, asked(1, 4))

    asyncio.run(main())
    assert groups == [(1, ME), (2, OTHER), (3, ME), (4, OTHER)]


def test_a_request_that_a_new_start_cannot_serve_fails_with_the_reason(tmp_path):
    async def main():
        async with living(tmp_path / "a", backend=Sampler(is_open=False)) as service:
            sampler = await sampler_of(service)
            chunk = {"type": "encoded_text", "tokens": list(range(20))}
            long = service.sample(ME, sampler, 1, asked(1) | {"prompt": {"chunks": [chunk]}})
            short = service.sample(ME, sampler, 2, asked(1))
            await asyncio.sleep(0.05)
        backend = FakeBackend()
        backend.context_length = 8
        async with living(tmp_path / "a", backend=backend) as service:
            row = await answered(service, long, state="refused")
            assert "a prompt of 20 tokens; it has to have 1 to 7" in message_of(row)
            await answered(service, short)
            assert service.queue.waiting() == {}

    asyncio.run(main())


def test_a_poll_waits_for_the_first_end_and_no_longer(tmp_path):
    async def main():
        backend = Sampler(is_open=False)
        async with living(tmp_path / "a", backend=backend) as service:
            sampler = await sampler_of(service)
            ids = {service.sample(ME, sampler, i, asked(1)) for i in (1, 2)}
            poll = asyncio.create_task(service.queue.ended_after(sampler, 0, 30.0))
            await asyncio.sleep(0.05)
            assert not poll.done()
            backend.gate.set()
            assert {row.id for _, row in await poll} <= ids and poll.result()
            for id in ids:
                await answered(service, id)
            at_once = await asyncio.wait_for(service.queue.ended_after(sampler, 0, 30.0), 10)
            assert {row.id for _, row in at_once} == ids

    asyncio.run(main())


def test_the_last_failures_are_the_newest_of_those_that_failed_and_of_those_that_were_refused(tmp_path):
    async def main():
        async with living(tmp_path / "a", backend=Mortal()) as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            for seq_id in range(1, 5):
                token, state = ((13, "refused"), (FAILS, "failed"))[seq_id % 2]
                await answered(service, submit(service, mine, seq_id, token), state=state)
            newest = [f"{mine}:{seq_id}" for seq_id in (4, 3, 2, 1)]
            assert [row.id for row in service.queue.last_failed(ME, 10)] == newest
            assert [row.id for row in service.queue.last_failed(ME, 3)] == newest[:3]
            assert service.queue.last_failed(OTHER, 10) == []

    asyncio.run(main())


def test_what_ends_between_two_microseconds_is_not_listed_behind_its_own_cursor(tmp_path, monkeypatch):
    """A float of seconds since 1970 has no quarter of a microsecond: half of one may round away."""
    monkeypatch.setattr("rl.tinker.requests.now", lambda: 1796039621.8402426)

    async def main():
        async with living(tmp_path / "a") as service:
            model = await make_model(service, service.create_session(ME, None, None))
            ids = [submit(service, model, seq_id) for seq_id in (1, 2, 3)]
            for id in ids:
                await answered(service, id)
            listed, cursor = [], 0
            for _ in range(4):  # the model's own is the first
                cursor, row = (await service.queue.ended_after(model, cursor, 0))[0]
                listed.append(row.id)
            assert listed[1:] == ids and await service.queue.ended_after(model, cursor, 0) == []

    asyncio.run(main())


def test_what_ends_after_a_restart_comes_behind_all_that_ended_before_it(tmp_path, monkeypatch):
    """Also where the clock was set back, and whatever became of the last one."""

    async def main():
        async with living(tmp_path / "a", backend=Mortal()) as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            for seq_id, (token, state) in enumerate(((FAILS, "failed"), (13, "refused"), (1, "done")), 1):
                await answered(service, submit(service, mine, seq_id, token), state=state)
            cursor, last = (await service.queue.ended_after(mine, 0, 0))[-1]
            assert last.id == f"{mine}:3"
        monkeypatch.setattr("rl.tinker.requests.now", lambda: 1000.0)
        async with living(tmp_path / "a") as service:
            id = submit(service, mine, 4)
            await answered(service, id)
            assert [row.id for _, row in await service.queue.ended_after(mine, cursor, 0)] == [id]

    asyncio.run(main())


class Forgetful(FakeBackend):
    """What it refuses costs the gradient, as in engines."""

    async def forward_backward(self, model, *rest):
        try:
            return await super().forward_backward(model, *rest)
        except UserError:
            self.models[model]["gradient"] = 0.0
            raise


def test_a_request_that_is_refused_costs_the_model_no_gradient(tmp_path):
    async def main():
        async with living(tmp_path / "a", backend=Forgetful()) as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            await answered(service, submit(service, mine, 1))
            await answered(service, submit(service, mine, 2, 13), state="refused")
            await answered(service, service.optim_step(ME, mine, 3, ADAM))
            assert await value_of(service, mine, 4) == pytest.approx(0.3)

    asyncio.run(main())


def test_an_error_that_nobody_foresaw_ends_its_request_and_leaves_the_model_as_it_was(tmp_path):
    class Broken(FakeBackend):
        is_broken = False

        async def optim_step(self, model, params):
            if self.is_broken:
                self.models[model]["value"] += 100
                raise ValueError("in the middle")
            return await super().optim_step(model, params)

    async def main():
        async with living(tmp_path / "a", backend=Broken()) as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            await train(service, mine, 1)
            await answered(service, submit(service, mine, 3))
            service.backend.is_broken = True
            row = await answered(service, service.optim_step(ME, mine, 4, ADAM), state="failed")
            assert json.loads(row.result) == {
                "error": "optim_step failed: ValueError('in the middle')", "category": "server"
            }  # fmt: skip
            service.backend.is_broken = False
            await train(service, mine, 5)
            assert await value_of(service, mine, 7) == pytest.approx(0.6)

    asyncio.run(main())


def test_an_engine_that_dies_as_a_model_leaves_it_brings_the_others_back(tmp_path):
    async def main():
        backend = Mortal()
        async with living(tmp_path / "a", backend=backend) as service:
            mine, other = await models_of_both(service)
            await train(service, mine, 1)
            await train(service, other, 1, OTHER)
            backend.lose_at = len(backend.log) + 1
            await answered(service, submit(service, mine, 3, BREAKS), state="failed")
            assert backend.log[-1] == ("remove", mine) and not backend.models
            await train(service, other, 3, OTHER)
            await train(service, mine, 5)
            assert await value_of(service, other, 5, OTHER) == pytest.approx(0.6)
            assert await value_of(service, mine, 7) == pytest.approx(0.6)

    asyncio.run(main())


@pytest.mark.parametrize("lose_at", [1, 2, 3])
def test_an_engine_that_dies_while_it_restores_a_model_restores_it_once_more(tmp_path, lose_at):
    """As it makes it, and in each of the two requests that are done again."""

    async def main():
        async with living(tmp_path / "a") as service:
            mine = await make_model(service, service.create_session(ME, None, None))
            await train(service, mine, 1)
        backend = FakeBackend()
        backend.lose_at = lose_at
        async with living(tmp_path / "a", backend=backend) as service:
            await train(service, mine, 3)
            assert await value_of(service, mine, 5) == pytest.approx(0.6)

    asyncio.run(main())


def num_tasks():
    gc.collect()
    return sum(type(thing) is asyncio.Task for thing in gc.get_objects())


def test_no_task_is_left_of_a_sample_that_has_been_answered(tmp_path):
    async def main():
        async with living(tmp_path / "a") as service:
            sampler, counts = await sampler_of(service), []
            for seq_id in range(1, 6):
                await answered(service, service.sample(ME, sampler, seq_id, asked(1)))
                await asyncio.sleep(0.01)
                counts.append(num_tasks())
            assert counts[2:] == [counts[1]] * 3

    asyncio.run(main())


def test_a_large_request_beside_another_tenants_runs_in_small_parts(tmp_path):
    async def main():
        backend = Sampler(is_open=False)
        async with living(tmp_path / "a", backend=backend) as service:
            service.sample(OTHER, await sampler_of(service, OTHER), 1, asked(1, token=2))
            large = service.sample(ME, await sampler_of(service), 1, asked(256))
            await asyncio.sleep(0.05)
            assert backend.running == {1: 8, 2: 1}
            backend.gate.set()
            await answered(service, large)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["snapshot", "inflight"])
def test_weights_that_go_before_a_sample_has_read_them(tmp_path, kind):
    """It is refused; where others took their place, in flight, it is drawn with those."""

    async def main():
        backend = Sampler(is_open=False)
        async with living(tmp_path / "a", backend=backend) as service:
            session = service.create_session(ME, None, None)
            model = await make_model(service, session)

            async def save_as(number):
                asked_for = {"sampling_session_seq_id": number, "kind": kind}
                await save(service, "save_weights_for_sampler", model, number, **asked_for)

            await save_as(1)
            id = service.sample(ME, f"{session}:sample:1", 1, asked(1))
            await asyncio.sleep(0.05)
            assert backend.running.total() == 1
            if kind == "snapshot":
                await service.finish_session(ME, session)
                backend.gate.set()
                row = await answered(service, id, state="refused")
                gone = "these weights were deleted; create another sampling session"
                assert json.loads(row.result) == {"error": gone, "category": "user"}
                return
            await train(service, model, 2)
            await save_as(4)
            backend.gate.set()
            row = await answered(service, id)
            (sequence,) = deserialize_sample_response(row.result).sequences
            assert sequence.logprobs == pytest.approx([-0.3] * 3)

    asyncio.run(main())


def test_a_sample_whose_session_is_over_when_its_turn_comes_is_refused(tmp_path):
    """Until then it has not begun: no death of the server is its own."""

    async def main():
        backend = Sampler(is_open=False)
        async with living(tmp_path / "a", backend=backend) as service:
            session = service.create_session(ME, None, None)
            sampler = service.create_sampler(ME, session, 0, NAME, None)
            ids = [service.sample(ME, sampler, seq_id, asked(256)) for seq_id in (1, 2)]
            await asyncio.sleep(0.05)
            rows = [service.database.get(requests, id, "id") for id in ids]
            assert [row.deaths for row in rows] == [1, 0]
            await service.finish_session(ME, session)
            backend.gate.set()
            await answered(service, ids[0])
            row = await answered(service, ids[1], state="refused")
            over = "its sampling session is over; create another"
            assert json.loads(row.result) == {"error": over, "category": "user"}

    asyncio.run(main())


def test_a_sample_with_which_the_server_died_is_tried_alone_and_then_no_more(tmp_path):
    tried = []

    class Noting(Sampler):
        async def sample(self, adapter, prompt, n, params, max_deaths=3):
            tried.append(max_deaths)
            return await super().sample(adapter, prompt, n, params, max_deaths)

    async def main():
        id = None
        for _ in range(3):
            async with living(tmp_path / "a", backend=Noting(is_open=False)) as service:
                id = id or service.sample(ME, await sampler_of(service), 1, asked(1))
                await asyncio.sleep(0.05)
                service.queue.stop = lambda: None  # as where the process is killed
        async with living(tmp_path / "a", backend=Noting()) as service:
            row = await answered(service, id, state="failed")
            assert "the server died 3 times while this request ran" in message_of(row)
        assert tried == [2, 2, 1]

    asyncio.run(main())


def test_a_tenant_whose_samples_keep_killing_generators_has_to_wait_and_others_do_not(tmp_path):
    """Also one that was to be tried alone when there were too many."""

    async def main():
        backend = Sampler()
        async with living(tmp_path / "a", Limits(max_deaths=3), backend) as service:
            sampler = await sampler_of(service)
            ids = [service.sample(ME, sampler, seq_id, asked(1, KILLS)) for seq_id in (1, 2)]
            rows = [await service.queue.wait(id, ME, 30) for id in ids]
            assert [row.state for row in rows] == ["failed", "refused"]
            assert backend.num_deaths == {2: 4, 1: 1}
            with pytest.raises(UserError, match="limits.max_deaths is 3"):
                service.sample(ME, sampler, 3, asked(1))
            other = await sampler_of(service, OTHER)
            await answered(service, service.sample(OTHER, other, 1, asked(1)), OTHER)

    asyncio.run(main())


class Clocked(FakeBackend):
    """Its clock goes on by what a model's forward_backward takes, and by nothing else."""

    def __init__(self):
        super().__init__()
        self.now, self.seconds = 0.0, {}

    async def forward_backward(self, model, *rest):
        learned = await super().forward_backward(model, *rest)
        self.now += self.seconds[model]
        return learned

    def order(self):
        return [model for verb, model in self.log if verb == "forward_backward"]


@pytest.fixture
def clocked(monkeypatch):
    backend = Clocked()
    monkeypatch.setattr("rl.tinker.training.time", SimpleNamespace(monotonic=lambda: backend.now))
    monkeypatch.setattr("rl.tinker.training_queue._PATIENCE_SECONDS", 60.0)  # of the real clock
    return backend


def test_tenants_get_equal_time_of_the_training_engine_whatever_their_requests_take(tmp_path, clocked):
    async def main():
        async with living(tmp_path / "a", backend=clocked) as service:
            mine, other = await models_of_both(service)
            clocked.seconds = {mine: 4.0, other: 1.0}
            for seq_id in range(1, 5):
                submit(service, mine, seq_id)
            for seq_id in range(1, 11):
                last = submit(service, other, seq_id, tenant=OTHER)
            await answered(service, last, OTHER)
            four = [other] * 4
            assert clocked.order()[:13] == [mine, *four, mine, *four, mine, other, other]

    asyncio.run(main())


def test_the_engine_stays_idle_for_who_waits_for_each_answer_and_counts_it(tmp_path, clocked):
    """Of 4 seconds that the first has had, the other has 0.5 each time, and takes 1.2 to send the next."""

    async def main():
        async with living(tmp_path / "a", backend=clocked) as service:
            mine, other = await models_of_both(service)
            clocked.seconds = {mine: 4.0, other: 0.5}
            for seq_id in range(1, 4):
                submit(service, mine, seq_id)
            for seq_id in range(1, 5):
                await answered(service, submit(service, other, seq_id, tenant=OTHER), OTHER)
                await asyncio.sleep(0.01)
                clocked.now += 1.2
            assert clocked.order()[:6] == [mine, other, other, other, mine, other]

    asyncio.run(main())


def test_the_model_used_longest_ago_makes_room(tmp_path):
    async def main():
        async with living(tmp_path / "a", Limits(max_models=2)) as service:
            session = service.create_session(ME, None, None)
            first, _ = [await make_model(service, session, i) for i in range(2)]
            await train(service, first, 1)
            third = await make_model(service, session, 2)
            assert set(service.training.loaded) == {first, third}

    asyncio.run(main())


def test_a_model_that_made_room_between_its_steps_is_loaded_and_not_done_again(tmp_path):
    async def main():
        async with living(tmp_path / "a", Limits(max_models=1)) as service:
            session = service.create_session(ME, None, None)
            mine = await make_model(service, session)
            await train(service, mine, 1)
            await make_model(service, session, 1)
            begun = len(service.backend.log)
            await answered(service, submit(service, mine, 3))
            verbs = [verb for verb, model in service.backend.log[begun:] if model == mine]
            assert verbs == ["load", "forward_backward"]

    asyncio.run(main())


def prompt_of(*tokens):
    return {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}}


def test_a_request_weighs_its_prompt_and_what_is_drawn_along_it(tmp_path):
    async def main():
        async with living(tmp_path / "a") as service:
            body = asked(4) | prompt_of(5, 6, 7) | {"prompt_alt_tokens_k": 2}
            assert service.sampling.check(ME, body) == Load(4, 3 + 2 * 2, 3)

    asyncio.run(main())


def test_scores_of_a_prompts_end_are_of_its_last_tokens_alone(tmp_path):
    class Scoring(FakeBackend):
        async def sample(self, adapter, prompt, n, params, max_deaths=3):
            completions = await super().sample(adapter, prompt, n, params, max_deaths)
            likeliest = ((), *(((token, -0.5),) for token in prompt[1:]))
            return [replace(completion, prompt_likeliest=likeliest) for completion in completions]

    async def main():
        async with living(tmp_path / "a", backend=Scoring()) as service:
            wanted = {"prompt_logprobs": True, "topk_prompt_logprobs": 1, "prompt_logprobs_last_n": 1}
            (one,) = await service.sampling.sample(ME, None, asked(1) | prompt_of(5, 6, 7) | wanted)
            assert one.prompt_logprobs == (None, None, -7.0)
            assert one.prompt_likeliest == ((), (), ((7, -0.5),))

    asyncio.run(main())


def test_who_has_ended_too_many_engines_is_taken_again_when_enough_of_it_is_an_hour_ago():
    minutes = 0.0
    blame = Blame(2, lambda: minutes * 60)

    def waits(*tenants):
        """What each is told: how many deaths are counted, and for how many minutes it has to wait."""
        told = []
        for tenant in tenants:
            try:
                blame.check(tenant)
                told.append(None)
            except UserError as error:
                words = str(error).split()
                told.append((int(words[words.index("times") - 1]), int(words[words.index("minutes;") - 1])))
        return told

    for minutes in (0.0, 10.0, 20.0):  # noqa: B007  the clock reads it
        blame.add("me")
    minutes = 30.0
    assert waits("me", "other") == [(3, 40), None]
    minutes = 60.0
    assert waits("me") == [(2, 10)]
    minutes = 70.0
    assert waits("me") == [None]
    minutes = 90.0
    assert waits("me") == [None]
    blame.add("me", 2)
    assert waits("me") == [(2, 60)]


def test_nobody_cancels_anothers_request(tmp_path):
    async def main():
        backend = Sampler(is_open=False)
        async with living(tmp_path / "a", backend=backend) as service:
            id = service.sample(ME, await sampler_of(service), 1, asked(1))
            for tenant, named in ((OTHER, id), (ME, "none:sample:0:1")):
                with pytest.raises(NotFound, match="there is no request"):
                    service.cancel(tenant, named)
            backend.gate.set()
            await answered(service, id)

    asyncio.run(main())
