"""Random weights in a run's model/: bit for bit those that an engine draws, drawn once."""

import threading

import pytest
import torch

from rl.controller.abandoned import remove_unfinished
from rl.errors import RunError
from rl.models import random_weights
from rl.models.build import ENGINES
from rl.models.engine_config import EngineConfig
from rl.models.random_weights import draw_once
from rl.models.sources import TinyQwen3

CONFIGS = {
    "policy": {},
    "adapters on it, in bfloat16": {"adapters": True, "dtype": "bfloat16"},
    "critic": {"head": "value"},
    "shorter sequences": {"max_seq_len": 32},
}


@pytest.fixture
def model_dir(tmp_path):
    return TinyQwen3(alphabet="abcdefgh>").materialize(tmp_path)


def tensors(engine):
    return {shard.name: shard.data.clone() for shard in engine.export()}


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_loads_bit_for_bit_what_it_would_draw(kind, model_dir):
    drawn = {
        name: tensors(ENGINES[kind](model_dir, EngineConfig(seed=3, **settings)))
        for name, settings in CONFIGS.items()
    }
    draw_once(kind, model_dir, 3)
    for name, settings in CONFIGS.items():
        loaded = tensors(ENGINES[kind](model_dir, EngineConfig(**settings)))
        assert loaded.keys() == drawn[name].keys()
        assert all(torch.equal(loaded[n], tensor) for n, tensor in drawn[name].items()), name


def test_weights_are_drawn_once_and_again_only_from_another_seed_config_or_kind(
    model_dir, tmp_path, monkeypatch
):
    draw, draws = ENGINES["titan"].draw, []

    def count(kind):
        def counted(*arguments):
            draws.append(kind)
            return draw(*arguments)

        return counted

    for kind, engine in ENGINES.items():
        monkeypatch.setattr(engine, "draw", count(kind))
    path = model_dir / "model.safetensors"
    for kind, seed in (("titan", 3), ("titan", 3), ("titan", 4), ("hf", 4), ("hf", 4)):
        draw_once(kind, model_dir, seed)
    assert draws == ["titan", "titan", "hf"]
    TinyQwen3(alphabet="abcdefgh>", hidden_size=32).materialize(tmp_path)  # the same directory
    draw_once("hf", model_dir, 4)
    assert len(draws) == 4
    path.write_bytes(path.read_bytes()[:100])
    draw_once("hf", model_dir, 4)
    draw_once("hf", model_dir, 4)
    assert len(draws) == 5
    assert sorted(p.name for p in model_dir.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_all_processes_of_a_run_may_draw_at_once(model_dir, monkeypatch):
    """Threads stand for them: none sees a file that is half there."""
    weights = ENGINES["titan"].draw(model_dir, 3)
    together = threading.Barrier(4)

    def draw(*arguments):
        together.wait()
        return weights

    monkeypatch.setattr(ENGINES["titan"], "draw", draw)
    threads = [threading.Thread(target=draw_once, args=("titan", model_dir, 3)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.name for p in model_dir.glob("*safetensors*")] == ["model.safetensors"]
    ENGINES["titan"](model_dir, EngineConfig())


def test_a_full_disk_keeps_no_part_of_the_weights_and_what_is_drawn_later_all_may_read(
    model_dir, monkeypatch
):
    def full(tensors, path, metadata):
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    before = sorted(model_dir.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(random_weights, "save_file", full)
        words = "model.safetensors could not be written .*No space left on device.*; make room on its disk"
        with pytest.raises(RunError, match=words):
            draw_once("titan", model_dir, 3)
    assert sorted(model_dir.iterdir()) == before
    draw_once("titan", model_dir, 3)
    assert (model_dir / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_weights_whose_drawing_was_killed_go_with_the_next_start_of_the_run(tmp_path, monkeypatch):
    """Its name is known in two places, of which one cannot import torch."""

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    model_dir = TinyQwen3("ab").materialize(tmp_path)
    before = sorted(model_dir.iterdir())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(random_weights, "sync", die)
        draw_once("titan", model_dir, 3)
    assert len(sorted(model_dir.iterdir())) == len(before) + 1
    remove_unfinished(tmp_path)
    assert sorted(model_dir.iterdir()) == before
