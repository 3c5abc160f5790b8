"""How vLLM gives back the memory of its weights and its cache, and takes it again.

On a GPU that is vLLM's own sleep mode, which it has to be started with. A CPU's build has none: there the
cache's storage is emptied, and the weights that vLLM packed are dropped. What it did not pack stays, such as
the embedding.
"""

from collections.abc import Iterator
from typing import Any

import torch

from rl.models.suspension import give_back


def suspend(engine: Any) -> None:
    """engine: an LLMEngine without requests. Of what is suspended already, nothing changes."""
    if torch.accelerator.is_available():
        engine.sleep(level=2)
    else:
        engine.collective_rpc(_suspend_on_cpu)


def take_weights(engine: Any) -> None:
    """Before weights are loaded."""
    if torch.accelerator.is_available():
        engine.wake_up(tags=["weights"])


def take_cache(engine: Any) -> None:
    """After they are loaded. What the cache held is gone."""
    if torch.accelerator.is_available():
        engine.wake_up(tags=["kv_cache"])
    else:
        engine.collective_rpc(_take_cache_on_cpu)


def _suspend_on_cpu(worker: Any) -> None:
    runner = worker.model_runner
    if full := [storage for storage in _caches(runner) if storage.nbytes()]:
        runner.size_of_emptied = {storage._cdata: storage.nbytes() for storage in full}
    for storage in full:
        storage.resize_(0)
    drop_packed(runner.model)
    give_back(torch.device("cpu"))


def _take_cache_on_cpu(worker: Any) -> None:
    runner = worker.model_runner
    for storage in _caches(runner):
        storage.resize_(runner.size_of_emptied[storage._cdata])


def _caches(runner: Any) -> Iterator[torch.UntypedStorage]:
    """Each storage once: layers may share one."""
    storages = (cache.untyped_storage() for cache in runner.kv_caches)
    yield from {storage._cdata: storage for storage in storages}.values()


def drop_packed(model: torch.nn.Module) -> None:
    """The packed weights of a CPU's linear layers, which the next loading makes anew."""
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            module.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]
