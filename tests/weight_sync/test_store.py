"""WeightStore: what exists at any moment, whatever the rhythm of publishing and reading."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.errors import RunError
from rl.types import LoRA
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import MAX_VERSIONS, WeightStore
from tests.virtual_time import run_virtually


class Memory:
    """Versions that take room, from the moment they begin to be written until they are released."""

    def __init__(self):
        self.there = set()
        self.most = 0
        self.store = WeightStore(self.release)

    async def release(self, manifest):
        await asyncio.sleep(0)
        self.there.remove((manifest.name, manifest.version))

    async def publish(self, version, adapter=None):
        name = adapter[0] if adapter else MODEL

        async def write():
            self.there.add((name, version))
            self.most = max(self.most, len(self.there))
            await asyncio.sleep(0)
            return Manifest(version, (), adapter)

        await self.store.publish(name, write)


def test_only_the_newest_stays_when_nobody_reads():
    async def main():
        memory = Memory()
        for version in (0, 1, 2, 7, 20):
            await memory.publish(version)
        assert memory.there == {(MODEL, 20)} and memory.store.newest(MODEL).version == 20

    asyncio.run(main())


def test_the_same_version_is_published_again():
    """A trainer that died after it had published, and took the step again."""

    async def main():
        memory = Memory()
        await memory.publish(3)
        first = memory.store.newest(MODEL)
        await memory.publish(3)
        assert memory.store.newest(MODEL) is not first and memory.there == {(MODEL, 3)}

    asyncio.run(main())


def test_what_is_read_stays_until_it_was_read_and_the_fourth_version_waits():
    async def main():
        memory = Memory()
        await memory.publish(0)
        async with memory.store.reading(memory.store.newest(MODEL)):
            await memory.publish(1)
            await memory.publish(2)
            assert memory.there == {(MODEL, 0), (MODEL, 2)}
            async with memory.store.reading(memory.store.newest(MODEL)):
                await memory.publish(3)
                fourth = asyncio.create_task(memory.publish(4))
                await asyncio.sleep(0.01)
                assert not fourth.done() and memory.there == {(MODEL, 0), (MODEL, 2), (MODEL, 3)}
            await asyncio.wait_for(fourth, 1)
        assert memory.there == {(MODEL, 4)} and memory.most == MAX_VERSIONS

    asyncio.run(main())


def test_a_version_that_is_being_written_takes_a_place():
    """Of two that write at the same time the second waits, where there is room for one."""

    async def main():
        memory, begun, may_end = Memory(), [], asyncio.Event()
        await memory.publish(0)

        def writes(version):
            async def write():
                begun.append(version)
                await may_end.wait()
                return Manifest(version, ())

            return asyncio.create_task(memory.store.publish(MODEL, write))

        async with memory.store.reading(memory.store.newest(MODEL)):
            await memory.publish(1)  # two are there
            writing = [writes(2), writes(3)]
            await asyncio.sleep(0.01)
            assert begun == [2]
            may_end.set()
            memory.there.add((MODEL, 2))
            memory.there.add((MODEL, 3))
            await asyncio.wait_for(asyncio.gather(*writing), 1)
        assert begun == [2, 3] and memory.store.versions == {MODEL: [3]}

    asyncio.run(main())


def test_an_adapters_base_stays_beside_its_versions():
    async def main():
        memory, adapter = Memory(), ("policy", LoRA(rank=4))
        await memory.publish(0)
        for version in range(5):
            await memory.publish(version, adapter)
        assert memory.there == {(MODEL, 0), ("policy", 4)} and memory.most == 1 + 2

    run_virtually(main())


@pytest.mark.parametrize("adapter", [None, ("policy", LoRA(rank=4))])
def test_a_version_that_is_read_without_an_end_holds_up_no_other(adapter):
    """Such as the one that a long evaluation keeps the generators at."""

    async def main():
        memory = Memory()
        name = adapter[0] if adapter else MODEL
        await memory.publish(0)
        for version in range(1, 6):
            await memory.publish(version, adapter)
        async with memory.store.reading(memory.store.newest(name)):
            for version in range(6, 12):
                await memory.publish(version, adapter)
            assert memory.there >= {(name, 5), (name, 11)}

    run_virtually(main())


def test_a_version_that_is_gone_or_older_is_refused():
    async def main():
        memory = Memory()
        await memory.publish(3)
        old = memory.store.newest(MODEL)
        await memory.publish(4)
        with pytest.raises(RunError, match="version 3 of model is no longer there"):
            async with memory.store.reading(old):
                pass
        with pytest.raises(RunError, match="version 2 of model was published after version 4"):
            await memory.publish(2)

    asyncio.run(main())


@settings(max_examples=150, deadline=None)
@given(
    pauses=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    readers=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=10), max_size=4),
    with_adapter=st.booleans(),
)
def test_whatever_the_rhythm_three_versions_at_most_and_no_reader_loses_its_own(
    pauses, readers, with_adapter
):
    async def main():
        memory, adapter = Memory(), ("policy", LoRA(rank=4)) if with_adapter else None
        name = adapter[0] if adapter else MODEL
        await memory.publish(0)
        if adapter:
            await memory.publish(0, adapter)

        async def read(durations):
            for duration in durations:
                async with memory.store.reading(memory.store.newest(name)) as manifest:
                    for _ in range(duration):
                        await asyncio.sleep(0)
                        assert (name, manifest.version) in memory.there
                await asyncio.sleep(0)

        async def write():
            for version, pause in enumerate(pauses, 1):
                for _ in range(pause):
                    await asyncio.sleep(0)
                await memory.publish(version, adapter)

        await asyncio.gather(write(), *map(read, readers))
        assert memory.most <= MAX_VERSIONS + bool(adapter)
        assert memory.there == ({(MODEL, 0)} if adapter else set()) | {(name, len(pauses))}

    run_virtually(main())


def test_versions_that_are_forgotten_go_when_nobody_reads_them_and_lower_ones_may_come():
    async def main():
        memory = Memory()
        for version in (6, 7):
            await memory.publish(version)
        async with memory.store.reading(memory.store.newest(MODEL)):
            forgetting = asyncio.create_task(memory.store.forget(MODEL))
            await asyncio.sleep(0.01)
            assert memory.store.newest(MODEL) is None and memory.there == {(MODEL, 7)}
            assert not forgetting.done()
        await forgetting
        assert not memory.there
        await memory.publish(4)
        assert memory.store.newest(MODEL).version == 4 and memory.there == {(MODEL, 4)}

    asyncio.run(main())


def entries(store):
    """What the store remembers, over all of its containers."""
    held = [value for value in vars(store).values() if isinstance(value, dict | set | list)]
    nested = [inner for value in held if isinstance(value, dict) for inner in value.values()]
    return sum(len(value) for value in held) + sum(len(inner) for inner in nested if isinstance(inner, dict))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["read", "publish", "fail", "forget"]), st.integers(0, 3)), max_size=60
    )
)
def test_what_a_store_remembers_follows_from_what_exists(actions):
    """However many versions, names and readers there were."""

    async def main():
        memory, version = Memory(), 0
        await memory.publish(0)

        async def fail():
            raise RunError("no")

        for action, number in actions:
            adapter, version = (f"policy-{number}-{version}", LoRA(rank=4)), version + 1
            if action == "publish":
                await memory.publish(version)
            elif action == "read":
                async with memory.store.reading(memory.store.newest(MODEL)):
                    await memory.publish(version)
            elif action == "fail":
                with pytest.raises(RunError):
                    await memory.store.publish(adapter[0], fail)
            else:
                await memory.publish(version, adapter)
                async with memory.store.reading(memory.store.newest(adapter[0])):
                    pass
                await memory.store.forget(adapter[0])
        assert memory.store.versions.keys() == {MODEL}
        assert entries(memory.store) == 2  # the model, and its newest version

    asyncio.run(main())
