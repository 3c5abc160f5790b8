"""Two tenants on generators whose every step takes `FIXED + PER_TOKEN * tokens`: what each gets done."""

# holds: exact, a simulation in made-up time

import random
from dataclasses import dataclass

import pytest

from rl.tinker.sampling_queue import Load, Part, SamplingQueue

PER_TOKEN = 0.001  # seconds
HALF = 8  # sequences with which a step takes twice as long as an empty one
FIXED = HALF * PER_TOKEN
STEP_TOKENS = 2048
MAX_SEQUENCES = 256
SECONDS = 200.0


@dataclass(eq=False)
class Client:
    """Keeps `num_requests` of its requests at a time, or pauses after each that many."""

    name: str
    num_requests: int
    num_samples: int = 1
    prompt: int = 20
    length: int = 100
    claims: int | None = None  # tokens of an answer; None: as they are
    pause: float = 0.0
    num_tokens: int = 0
    outstanding: int = 0
    idle_until: float = 0.0

    @property
    def load(self):
        return Load(self.num_samples, self.prompt, self.claims or self.length)


@dataclass(eq=False)
class Running:
    client: Client
    part: Part
    prefill: int
    steps: int
    is_admitted: bool = False


class Generators:
    """Continuous batching: chunked prefill within a step's budget of tokens, first come, first served."""

    def __init__(self):
        self.requests = []

    def step(self):
        """Seconds that it took, and what ended."""
        sequences = 0
        for request in self.requests:
            if sequences + request.part.count <= MAX_SEQUENCES or not sequences:
                request.is_admitted = True
                sequences += request.part.count
        tokens, ended = 0, []
        for request in self.requests:
            if not request.is_admitted:
                continue
            if request.prefill:
                part = min(request.prefill, STEP_TOKENS - tokens)
                request.prefill -= part
                tokens += part
            else:
                tokens += request.part.count
                request.steps -= 1
                if request.steps <= 0:
                    ended.append(request)
        self.requests = [request for request in self.requests if request not in ended]
        return FIXED + PER_TOKEN * tokens, ended


def serve(clients, queue_of=lambda clock: SamplingQueue(MAX_SEQUENCES, HALF, clock), seconds=SECONDS):
    """Tokens that each client had sampled."""
    now = 0.0
    queue, generators, clients_of, number = queue_of(lambda: now), Generators(), {}, 0
    while now < seconds:
        for client in clients:
            if now < client.idle_until or (client.pause and client.outstanding):
                continue
            for _ in range(client.num_requests - client.outstanding):
                client.outstanding += 1
                number += 1
                queue.add((client.name, number), client.name, client.load)
                clients_of[client.name, number] = [client, client.num_samples]
        for part in queue.start():
            client, _ = clients_of[part.key]
            generators.requests.append(Running(client, part, client.prompt, client.length))
        if not generators.requests:
            now += 0.01
            continue
        took, ended = generators.step()
        now += took
        for running in ended:
            client, part = running.client, running.part
            queue.end(part, client.length)
            client.num_tokens += part.count * client.length
            clients_of[part.key][1] -= part.count
            if not clients_of[part.key][1]:
                del clients_of[part.key]
                client.outstanding -= 1
                if client.pause and not client.outstanding:
                    client.idle_until = now + client.pause
    return [client.num_tokens for client in clients]


VICTIMS = {
    "one sequence": dict(num_requests=1),
    "eight": dict(num_requests=8),
    "groups of 16, then a training step": dict(num_requests=4, num_samples=16, pause=5.0),
    "all it can": dict(num_requests=300),
    "long prompts": dict(num_requests=4, prompt=1500, length=200),
    "short answers": dict(num_requests=8, prompt=500, length=5),
}
ATTACKS = {
    "many requests of 256": dict(num_requests=100, num_samples=256, length=500),
    "one sequence at a time": dict(num_requests=1),
    "prompts that fill every step": dict(num_requests=200, prompt=2000, length=1),
    "prompts that claim long answers": dict(num_requests=200, prompt=2000, length=1, claims=1000),
    "many short ones": dict(num_requests=500, prompt=1, length=1),
    "waves": dict(num_requests=10, num_samples=50, length=300, pause=20.0),
}


class Everything(SamplingQueue):
    """All requests at once, as they come."""

    def _is_due(self, tenant):
        return True


@pytest.mark.parametrize("victim", VICTIMS.values(), ids=VICTIMS)
def test_a_tenant_keeps_over_a_third_of_what_it_has_alone(victim):
    (alone,) = serve([Client("victim", **victim)])
    for name, attack in ATTACKS.items():
        beside, _ = serve([Client("victim", **victim), Client("attacker", **attack)])
        assert beside / alone > 1 / 3, name


def test_without_the_queue_it_does_not():
    def everything(clock):
        return Everything(MAX_SEQUENCES, HALF, clock)

    (alone,) = serve([Client("victim", **VICTIMS["eight"])], everything)
    attacker = Client("attacker", **ATTACKS["many requests of 256"])
    beside, _ = serve([Client("victim", **VICTIMS["eight"]), attacker], everything)
    assert beside / alone < 0.1


def test_a_tenant_alone_is_not_held_back():
    for victim in VICTIMS.values():
        (queued,) = serve([Client("victim", **victim)])
        (at_once,) = serve([Client("victim", **victim)], lambda clock: Everything(MAX_SEQUENCES, HALF, clock))
        assert queued > 0.98 * at_once


def test_four_tenants_that_want_all_get_a_quarter_each():
    tenants = [Client(f"tenant-{i}", num_requests=50 * (i + 1), num_samples=i + 1) for i in range(4)]
    tokens = serve(tenants)
    assert min(tokens) > 0.7 * max(tokens)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_comes_every_sample_runs_once_and_nothing_is_left(seed):
    """Any tenants, sizes, cancellations and pauses. The queue is empty at the end, and remembers nobody."""
    rng, now, number = random.Random(seed), 0.0, 0
    queue = SamplingQueue(16, 4, lambda: now)
    sizes, started, running = {}, {}, []
    while number < 200 or sizes:
        now += rng.choice((0.0, 0.1, 5.0, 100.0))
        if number < 200 and rng.random() < 0.6:
            load = Load(rng.randint(1, 40), rng.randint(1, 5000), rng.randint(1, 1000))
            queue.add(number, f"tenant-{rng.randrange(4)}", load)
            sizes[number], started[number] = load.num_samples, []
            number += 1
        elif sizes and rng.random() < 0.1:
            removed = rng.choice(sorted(sizes))
            queue.remove(removed)
            del sizes[removed]
            running = [part for part in running if part.key != removed]
        elif running:
            part = running.pop(rng.randrange(len(running)))
            queue.end(part, rng.choice((None, 1.0, 500.0)))
            if sum(started[part.key]) == sizes[part.key] and all(part.key != other.key for other in running):
                del sizes[part.key]
        for part in queue.start():
            assert part.key in sizes and part.first == sum(started[part.key]) and 1 <= part.count <= 4
            started[part.key].append(part.count)
            running.append(part)
        assert running or not sizes, "nobody runs, and somebody waits"
    now += 1000
    assert not queue._running and not queue._waiting and not queue._all_present()


def test_who_was_away_holds_up_no_heavy_request_of_who_was_not():
    """It counts as having had as much; from there on, who has had over two seconds more waits."""
    now = 0.0
    queue = SamplingQueue(16, 8, lambda: now)
    heavy, light = Load(1, 10_000, 1), Load(1, 1, 100)

    def start():
        return [part.key for part in queue.start()]

    queue.add("first", "old", heavy)
    (part,) = queue.start()
    now = 1000.0
    queue.end(part)
    queue.add("second", "old", heavy)
    (part,) = queue.start()
    queue.add("light", "new", light)
    assert start() == ["light"]
    queue.end(part)
    queue.add("third", "old", heavy)
    (part,) = queue.start()
    assert part.key == "third"
    now = 1003.0
    queue.end(part)
    queue.add("fourth", "old", heavy)
    assert start() == []
    now = 1010.0
    assert start() == ["fourth"]
