"""WeightStore: the owner of every published version of the weights."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rl.errors import RunError
from rl.types import PolicyVersion
from rl.waiting import Signal
from rl.weight_sync.manifest import Manifest

MAX_VERSIONS = 3
"""Versions of a name that exist at a time, with the one being written."""


class WeightStore:
    """Knows which versions exist and who reads them, and frees all others, whatever the rhythm of publishing.

    Invariants, for each name (the model, or an adapter):
    1. The newest complete version is kept: a generator that is started again finds it.
    2. A version that is being read is kept until its last reader is done.
    3. Every other version is freed as soon as nobody reads it.
    4. At most MAX_VERSIONS exist: who wants to write one more waits until a reader is done. An adapter's base
       is a version of the model, not of the adapter.
    """

    def __init__(self, release: Callable[[Manifest], Awaitable[None]]):
        self._release = release
        self._versions: dict[str, dict[PolicyVersion, Manifest]] = {}
        self._readers: Counter[tuple[str, PolicyVersion]] = Counter()
        self._writing: Counter[str] = Counter()
        self._freeing: set[tuple[str, PolicyVersion]] = set()
        self._forgotten: set[str] = set()
        self.changed = Signal()

    async def wait_for_room(self, name: str) -> None:
        """Until one more version may be written."""
        await self.changed.wait_for(lambda: self._num_versions(name) < MAX_VERSIONS)

    async def publish(self, name: str, write: Callable[[], Awaitable[Manifest]]) -> None:
        """Call `write` once there is room for a version more; the manifest it returns is then the newest."""
        await self.wait_for_room(name)
        self._writing[name] += 1
        try:
            manifest = await write()
        finally:
            self._writing -= Counter([name])  # keeps no zeros
        newest = self.newest(name)
        if newest is not None and manifest.version < newest.version:
            raise RunError(
                f"version {manifest.version} of {name} was published after version {newest.version}"
            )
        self._versions.setdefault(name, {})[manifest.version] = manifest
        await self._free(name)
        self.changed.notify()

    def newest(self, name: str) -> Manifest | None:
        versions = self._versions.get(name, {})
        return versions[max(versions)] if versions and name not in self._forgotten else None

    @asynccontextmanager
    async def reading(self, manifest: Manifest) -> AsyncIterator[Manifest]:
        """The version exists for as long as the context is open."""
        key = (manifest.name, manifest.version)
        if manifest.version not in self._versions.get(manifest.name, {}) or key in self._freeing:
            raise RunError(
                f"version {manifest.version} of {manifest.name} is no longer there; ask for the newest"
            )
        self._readers[key] += 1
        try:
            yield manifest
        finally:
            self._readers -= Counter([key])
            await self._free(manifest.name)

    async def forget(self, name: str) -> None:
        """Free every version, once nobody reads it: what is published next may have any number."""
        self._forgotten.add(name)
        try:
            await self._free(name)
            await self.changed.wait_for(lambda: not self._versions.get(name))
        finally:
            self._forgotten.discard(name)

    @property
    def versions(self) -> dict[str, list[PolicyVersion]]:
        """What exists, by name, in the order of publishing."""
        return {name: list(versions) for name, versions in self._versions.items()}

    def _num_versions(self, name: str) -> int:
        """With those that are being written."""
        return len(self._versions.get(name, {})) + self._writing[name]

    async def _free(self, name: str) -> None:
        versions = self._versions.get(name, {})
        for version, manifest in list(versions.items()):
            key = (name, version)  # asked again after each await: others free at the same time
            if (
                version not in versions
                or (version == max(versions) and name not in self._forgotten)
                or self._readers[key]
                or key in self._freeing
            ):
                continue
            self._freeing.add(key)
            try:
                await self._release(manifest)
            finally:
                self._freeing.discard(key)
                del versions[version]
                if not versions:
                    del self._versions[name]
                self.changed.notify()
