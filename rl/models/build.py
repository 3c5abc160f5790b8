"""The kinds of engine, by name."""

from rl.models.engine import Engine
from rl.models.hf_engine import HFEngine
from rl.models.titan import TitanEngine

ENGINES: dict[str, type[Engine]] = {"titan": TitanEngine, "hf": HFEngine}
