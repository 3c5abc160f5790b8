"""Tenants on an engine that takes one request at a time: what each gets done, in made-up time."""

# holds: exact, a simulation in made-up time

from dataclasses import dataclass

import pytest

from rl.tinker.training_queue import TrainingQueue

SECONDS = 600.0


@dataclass
class Client:
    """Sends a request of so many seconds, to one of its models in turn, a gap after the answer to the last."""

    tenant: str
    seconds: float
    gap: float = 0.005
    num_waiting: int = 1
    num_models: int = 1
    num_done: int = 0
    num_sent: int = 0
    sends_at: float = 0.0


@dataclass(frozen=True)
class Request:
    tenant: str
    target: str


def serve(*clients):
    """Requests that each client got done."""
    now = 0.0
    queue = TrainingQueue(lambda: now)
    by_tenant = {client.tenant: client for client in clients}

    def arrive():
        for client in clients:
            while client.num_sent - client.num_done < client.num_waiting and client.sends_at <= now:
                queue.add(Request(client.tenant, f"{client.tenant}-{client.num_sent % client.num_models}"))
                client.num_sent += 1

    def next_arrival():
        return min((c.sends_at for c in clients if c.sends_at > now), default=now + 1)

    while now < SECONDS:
        arrive()
        if not queue:
            now = next_arrival()
        elif idle := queue.idle_for():
            tenant, seconds = idle
            began, now = now, min(now + seconds, next_arrival())
            queue.charge_idle(tenant, now - began)
        else:
            client = by_tenant[queue.take().tenant]
            now += client.seconds
            queue.end(client.tenant, client.seconds)
            client.num_done += 1
            if client.num_waiting == 1:
                client.sends_at = now + client.gap
    return [client.num_done for client in clients]


VICTIMS = {
    "waits for each answer": dict(seconds=0.05),
    "samples in between": dict(seconds=0.05, gap=0.3),
    "sends ahead": dict(seconds=0.05, num_waiting=8),
    "long requests": dict(seconds=4.0),
}
ATTACKS = {
    "a queue of long requests": dict(seconds=20.0, num_waiting=1000, num_models=50),
    "a queue of short ones": dict(seconds=0.01, num_waiting=1000, num_models=50),
    "one short request a second": dict(seconds=0.01, gap=0.99),
    "one just past the patience": dict(seconds=0.01, gap=1.01),
    "waits for each answer": dict(seconds=0.05),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("victim", VICTIMS.values(), ids=VICTIMS)
def test_a_tenant_keeps_over_a_third_of_what_it_has_alone(victim, attack):
    (alone,) = serve(Client("victim", **victim))
    beside, _ = serve(Client("victim", **victim), Client("attacker", **attack))
    assert beside / alone > 1 / 3


def test_five_tenants_get_a_fifth_of_the_time_each():
    seconds = [0.02, 0.1, 0.5, 2.0, 5.0]
    done = serve(*(Client(f"tenant-{i}", s, num_waiting=i + 2) for i, s in enumerate(seconds)))
    times = [count * s for count, s in zip(done, seconds, strict=True)]
    assert min(times) > 0.7 * SECONDS / 5


def test_a_tenants_models_take_turns_and_a_models_requests_keep_their_order():
    queue = TrainingQueue(lambda: 0.0)
    sent = [Request("a", f"m{i % 3}") for i in range(9)]
    for request in sent:
        queue.add(request)
    taken = [queue.take() for _ in sent]
    assert [request.target for request in taken] == ["m0", "m1", "m2"] * 3
    assert [[r is s for r in taken if r.target == s.target].index(True) for s in sent] == [
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
        2,
    ]
    assert not queue


def test_a_tenant_that_was_away_has_saved_nothing_up():
    """However long another has worked meanwhile: from then on each has half, also when it comes again."""
    now = 0.0
    queue = TrainingQueue(lambda: now)

    def work(count):
        """How many of the next requests are the newcomer's. Each takes ten seconds."""
        nonlocal now
        taken = []
        for _ in range(count):
            taken.append(queue.take().tenant)
            now += 10
            queue.end(taken[-1], 10.0)
        return taken.count("new")

    for _ in range(300):
        queue.add(Request("old", "o"))
    assert work(100) == 0
    for _ in range(2):
        for _ in range(20):
            queue.add(Request("new", "n"))
        assert work(20) == 10 and work(20) == 10
        assert work(30) == 0
