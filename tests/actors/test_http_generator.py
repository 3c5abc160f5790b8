"""Generators that are servers elsewhere, reached by HTTP, behind the pool, the store and the shared memory of a run."""

import asyncio

import pytest
import torch

from rl.actors import replica as module
from rl.actors.generator_pool import GeneratorPool
from rl.actors.generator_replica import GeneratorReplica
from rl.types import SamplingParams
from rl.waiting import beside
from rl.weight_sync.manifest import MODEL, LocalShard, Manifest
from rl.weight_sync.shared_memory import SharedMemory
from rl.weight_sync.store import WeightStore
from tests.actors.http_generator import start


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch):
    monkeypatch.setattr(module, "_HEARTBEAT_SECONDS", 0.1)


def test_generators_behind_http_follow_the_weights_and_are_replaced(tmp_path):
    transport, members = SharedMemory(str(tmp_path)), []
    store = WeightStore(transport.release)

    def make(number, updates, changed):
        async def spawn():
            members.append(await start(f"generator-{number}", str(tmp_path)))
            return members[-1]

        return GeneratorReplica(f"generator-{number}", spawn, 2, "in_flight", updates, changed)

    async def publish(version):
        full = torch.full((4, 3), float(-version))

        async def write():
            shard = LocalShard("w", (4, 3), (0, 0), full, full.dtype)
            return Manifest(version, tuple(await transport.publish(MODEL, version, 0, [shard])))

        await store.publish(MODEL, write)

    async def sample(num_tokens, n=1):
        return await pool.sample([1, 2, 3], n, SamplingParams(num_tokens))

    async def main():
        async with beside(pool.run()):
            await pool.started()
            await publish(1)
            (one, two) = await sample(2, n=2)
            assert one == two and one.tokens.tolist() == [1, 1] and one.logprobs.tolist() == [-1.0, -1.0]

            long = asyncio.create_task(sample(60))  # 1.2 s, in which new weights come
            await asyncio.sleep(0.3)
            await publish(2)
            (across,) = await long
            assert (across.versions.oldest, across.versions.newest) == (1, 2)
            assert {*across.tokens.tolist()} == {1, 2}

            # Those that wait for a server that dies go to the other; what takes its place has the newest weights.
            many = [asyncio.create_task(sample(40)) for _ in range(8)]
            await asyncio.sleep(0.2)
            await members[0].kill()
            assert [each.tokens.tolist() for (each,) in await asyncio.gather(*many)] == [[2] * 40] * 8
            await pool.changed.wait_for(lambda: pool.num_serving == 2)
            assert sorted(replica.num_restarts for replica in pool.replicas) == [0, 1] and len(members) == 3
            await publish(3)
            await pool.changed.wait_for(lambda: all(replica.version == 3 for replica in pool.replicas))

            async def num_samples():
                await asyncio.sleep(0.3)  # two looks at each server
                return sum(member.num_samples for member in members[1:])

            nobody_waits = asyncio.create_task(sample(10_000))
            assert await num_samples() == 1
            nobody_waits.cancel()
            await asyncio.wait([nobody_waits])
            assert await num_samples() == 0
        assert all(member._process.poll() is not None for member in members)

    pool = GeneratorPool("generator", make, 2, MODEL, store)
    asyncio.run(asyncio.wait_for(main(), 60))
