"""AdapterSlots: which LoRA adapters vLLM holds, and which of them makes room for another."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path

from vllm.lora.request import LoRARequest

from rl.errors import RunError


class AdapterSlots:
    """At most `size` adapters, by name. Those that were published stay; one that is read from a directory,
    whose path is its name, leaves when nobody samples with it and another needs its place."""

    def __init__(self, add: Callable[[LoRARequest], object], remove: Callable[[int], object], size: int):
        """add, remove: vLLM's."""
        self._add = add
        self._remove = remove
        self._size = size
        self._numbers = count(1)  # vLLM takes one number for one adapter for good
        self._number_of: dict[str, int] = {}  # those that were ever published
        self._held: OrderedDict[str, LoRARequest] = OrderedDict()  # the one used longest ago first
        self._published: set[str] = set()

    def __getitem__(self, name: str) -> LoRARequest:
        self._held.move_to_end(name)
        return self._held[name]

    def publish(self, name: str, write: Callable[[int], Path]) -> None:
        """write(number) writes the adapter and says where. A name keeps its number, and so its place."""
        if name not in self._held and len(self._published) >= self._size:
            raise RunError(
                f"adapter {name!r} is one more than the {self._size} that this generator holds; "
                f"raise max_adapters"
            )
        if name not in self._held and not self._make_room(()):
            raise RunError(f"there is no room for adapter {name!r} while all others are sampled with")
        if name not in self._number_of:
            self._number_of[name] = next(self._numbers)
        number = self._number_of[name]
        path = str(write(number))
        self._add(LoRARequest(name, number, path, load_inplace=True))
        self._held[name] = LoRARequest(name, number, path)
        self._published.add(name)

    def read(self, directory: str, in_use: Collection[str]) -> bool:
        """Whether it is held now; False where all places are in use. Raises RunError where it cannot be read.

        in_use: those that are sampled with.
        """
        if directory in self._held:
            return True
        if not self._size:
            raise RunError("this generator takes no adapters; give it a max_lora_rank")
        if not self._make_room(in_use):
            return False
        request = LoRARequest(directory, next(self._numbers), directory)
        try:
            self._add(request)
        except Exception as error:  # vLLM's many ways to refuse an adapter
            raise RunError(f"vLLM could not load the adapter {directory}: {error}") from error
        self._held[directory] = request
        return True

    def clear(self) -> None:
        """All belong to a model that is gone."""
        for request in self._held.values():
            self._remove(request.lora_int_id)
        self._held.clear()
        self._published.clear()

    def _make_room(self, in_use: Collection[str]) -> bool:
        if len(self._held) < self._size:
            return True
        idle = (name for name in self._held if name not in self._published and name not in in_use)
        leaving = next(idle, None)
        if leaving is None:
            return False
        self._remove(self._held.pop(leaving).lora_int_id)
        return True
