"""The kinds of engine, by name."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from rl.models.engine import Engine

_CLASSES = {"titan": "rl.models.titan:TitanEngine", "hf": "rl.models.hf_engine:HFEngine"}


class _Engines(Mapping[str, type[Engine]]):
    """Each is imported when it is asked for: transformers takes a second that TitanEngine need not spend."""

    def __getitem__(self, kind: str) -> type[Engine]:
        module, _, name = _CLASSES[kind].partition(":")
        engine: type[Engine] = getattr(import_module(module), name)
        return engine

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


ENGINES = _Engines()
