"""What `rl serve` is told, and what it refuses before any process starts."""

# holds: exact, sums of whole bytes in float64

import json
import re
import socket
from dataclasses import replace

import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.cli import _serve
from rl.cluster.placement import place
from rl.controller.memory_plan import USABLE, on_devices, placed
from rl.controller.settings import setting_names
from rl.errors import ConfigError
from rl.models.layout import Layout
from rl.models.sources import TinyQwen3
from rl.paths import lock_directory
from rl.plan.cluster import GPU, Host
from rl.plan.memory import GIB, longest_sequence_bytes
from rl.tinker import memory
from rl.tinker.limits import Limits
from rl.tinker.serve import ServeConfig, _specs, serve
from rl.waiting import Deadlines
from tests.tiny import write_model

CPU = Host(8, 64.0)


def test_settings_reach_the_processes(tmp_path):
    config = ServeConfig(str(tmp_path))
    plain = _specs(config, tmp_path, 64, CPU)
    assert plain.trainer.config.adapters and plain.trainer.config.max_seq_len == 64
    assert plain.generator.max_model_len == 64 and plain.generator.stop_texts
    for change, found in [
        ({"engine": "hf"}, lambda s: s.trainer.kind == "hf"),
        ({"dtype": "bfloat16"}, lambda s: s.trainer.config.dtype == s.generator.dtype == "bfloat16"),
        ({"layout": Layout(shard=2)}, lambda s: s.roles["trainer"] == 2 == s.trainer.config.layout.shard),
        ({"num_generators": 3}, lambda s: s.roles["generator"] == 3 == s.num_generators),
        ({"kv_cache_gib": 0.5}, lambda s: s.generator.kv_cache_gib == 0.5),
        ({"limits": Limits(max_rank=8)}, lambda s: s.generator.max_lora_rank == 8),
        ({"limits": Limits(max_models=3)}, lambda s: s.generator.max_adapters == 3),
        (
            {"deadlines": Deadlines(train=7.0)},
            lambda s: s.trainer.config.timeout_seconds == 7.0 == s.deadlines.train,
        ),
        ({"deadlines": Deadlines(checkpoint=7.0)}, lambda s: s.trainer.config.save_seconds == 7.0),
    ]:
        assert not found(plain)
        assert found(_specs(replace(config, **change), tmp_path, 64, CPU)), change


@pytest.fixture
def model_dir(tmp_path):
    path = TinyQwen3(alphabet="abcdefgh").materialize(tmp_path)
    write_model(path, vocab_size=64)
    return path


def test_what_is_wrong_is_said_before_anything_starts(tmp_path, model_dir):
    with pytest.raises(ConfigError, match="nowhere"):
        serve(ServeConfig(str(tmp_path / "nowhere")))
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    lock_directory(occupied, "server")
    with pytest.raises(ConfigError, match="belongs to a server that is under way"):
        serve(ServeConfig(str(model_dir), directory=str(occupied)))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        serve(ServeConfig(str(model_dir), directory=str(tmp_path / "file")))
    (tmp_path / "keys").write_text("not a key\n")
    (tmp_path / "keys").chmod(0o600)
    with pytest.raises(ConfigError, match="begin with tml-"):
        serve(ServeConfig(str(model_dir), directory=str(tmp_path / "a"), api_key_file=str(tmp_path / "keys")))
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be listened on"):
            serve(ServeConfig(str(model_dir), directory=str(tmp_path / "c"), port=port))
    with pytest.raises(ConfigError, match="with a colon or two slashes"):
        serve(ServeConfig(str(model_dir), names=("a/b/c",)))
    with pytest.raises(ConfigError, match="database"):
        serve(ServeConfig(str(model_dir), directory=str(tmp_path / "b"), database="nonsense://"))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "MODEL"),
        (["m", "--port", "70000"], "port=70000 must be at least 0 and at most 65535"),
        (["m", "--port", "x"], "port"),
        (["m", "--limits.max_rank", "0"], "limits.max_rank=0 must be at least 1"),
        (["m", "--nonsense", "1"], "nonsense"),
    ],
)
def test_bad_flags_are_one_line(arguments, match):
    with pytest.raises(ConfigError, match=match):
        _serve(arguments)


@pytest.mark.parametrize("num_generators", range(1, 5))
@pytest.mark.parametrize("num_ranks", range(1, 4))
@pytest.mark.parametrize("num_gpus", range(1, 5))
def test_a_server_starts_on_any_number_of_gpus(model_dir, num_gpus, num_ranks, num_generators):
    """Each process has a GPU that is there; where some share one, both sides know what they may take."""
    machine = Host(8, 64.0, (GPU("H100", 78.8, (9, 0)),) * num_gpus)
    config = ServeConfig(str(model_dir), layout=Layout(shard=num_ranks), num_generators=num_generators)
    if num_ranks > num_gpus:
        with pytest.raises(ConfigError, match=f"the layout has {num_ranks} processes and the machine"):
            _specs(config, model_dir, 64, machine)
        return
    specs = _specs(config, model_dir, 64, machine)
    places = place(specs.roles, machine.num_cores, num_devices=num_gpus, shared=specs.share_devices)
    devices = [device for where in places.values() for device in where.devices]
    assert max(devices) < num_gpus
    assert (
        (len(devices) > len(set(devices))) == specs.share_devices == (num_ranks + num_generators > num_gpus)
    )
    cache, budget = specs.generator.kv_cache_gib, specs.trainer.config.device_memory_gib
    if not specs.share_devices:
        assert cache is budget is None
        return
    assert cache > 0 and budget > 0
    beside = max(
        sum(device == place for place in places["generator"].devices) for device in places["trainer"].devices
    )
    assert beside * cache + budget < machine.gpus[0].gib


@pytest.mark.parametrize("cache", [0.0, 1e-6, 0.1, 0.5, 1.0, 1.8, 200.0])
@pytest.mark.parametrize("gib", [0.1, 2.0, 4.0, 5.0, 80.0])
@pytest.mark.parametrize(("num_gpus", "num_generators"), [(1, 1), (1, 3), (2, 2), (2, 4)])
def test_a_server_on_shared_gpus_fits_them_or_is_refused(model_dir, cache, gib, num_gpus, num_generators):
    """What is planned for each GPU is at most what it has; else the message says by how much, and what to do."""
    machine = Host(8, 64.0, (GPU("H100", gib, (9, 0)),) * num_gpus)
    config = ServeConfig(str(model_dir), num_generators=num_generators, kv_cache_gib=cache)
    try:
        specs = _specs(config, model_dir, 64, machine)
    except ConfigError as error:
        if cache == 1e-6:
            assert re.search(
                r"kv_cache_gib=1e-06 is less than one sequence .* takes, [\d.e-]*[1-9]\d* GiB; raise it",
                str(error),
            )
        else:
            assert re.search(r" (?!0\.0)\d+\.\d GiB short[^;]*; .*use a smaller model", str(error)), error
            assert ("lower kv_cache_gib" in str(error)) == bool(cache)
        return
    assert cache != 1e-6
    memories = memory._memories(specs, machine)
    room = gib * USABLE * GIB
    for processes in on_devices(placed(specs.roles, memories, machine, shared=True)).values():
        assert sum(process.memory.total for process in processes) <= room
    assert specs.trainer.config.device_memory_gib * GIB >= memories["trainer"].total
    assert specs.generator.kv_cache_gib * GIB >= longest_sequence_bytes(memory._shape(specs), specs.generator)


def test_too_little_memory_for_a_server_is_said_before_anything_starts(model_dir):
    small = Host(8, 64.0, (GPU("T4", 2.0, (7, 5)),))
    with pytest.raises(ConfigError, match=r"share 1 x 2.0 GiB of GPU memory, \d\.\d GiB short of a cache"):
        _specs(ServeConfig(str(model_dir)), model_dir, 64, small)
    with pytest.raises(
        ConfigError, match=r"GPU 0 has 1.8 GiB .* need about .* GiB short; lower kv_cache_gib"
    ):
        _specs(ServeConfig(str(model_dir), kv_cache_gib=0.5), model_dir, 64, small)
    large = Host(8, 64.0, (GPU("H100", 79.6, (9, 0)),))
    asked = _specs(ServeConfig(str(model_dir), kv_cache_gib=0.5), model_dir, 64, large)
    assert asked.generator.kv_cache_gib == 0.5 and asked.share_devices


SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("cache", [0.0, 0.1, 0.3, 2.0])
@pytest.mark.parametrize("free", [1.0, 4.0, 6.5, 8.0, 64.0])
@pytest.mark.parametrize("context_length", [64, 2048, 8192, 131072])
@pytest.mark.parametrize("num_generators", [1, 3])
def test_a_server_on_a_cpu_fits_it_or_is_refused(tmp_path, context_length, free, cache, num_generators):
    """The cache has room for one sequence, and all processes for what they need; else the message has both figures."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = ServeConfig(
        str(tmp_path), context_length=context_length, kv_cache_gib=cache, num_generators=num_generators
    )
    machine = Host(8, free)
    blocks = context_length // 32 + 1  # vLLM keeps one for itself
    needed = blocks * 32 * 2 * 30 * 3 * 64 * 4 / GIB
    try:
        specs = _specs(config, tmp_path, context_length, machine)
    except ConfigError as error:
        if 0 < cache < needed:
            assert re.search(
                r"kv_cache_gib=.* is less than one sequence .* takes, [\d.]+ GiB; raise it", str(error)
            )
            return
        figures = re.search(
            r"needs about ([\d.]+) GiB \(trainer 1 x [\d.]+, generator \d x [\d.]+; .* ([\d.]+)\) but "
            r"([\d.]+) are free, ([\d.]+) GiB short; (.*)use a smaller model, context_length", str(error)
        )  # fmt: skip
        planned, there, short = (float(figures[i]) for i in (1, 3, 4))
        assert planned > free == there and short > 0
        assert figures[2] == f"{cache or max(0.25, needed):.2g}"
        assert (figures[5] == "lower kv_cache_gib, or ") == bool(cache)
        return
    assert specs.generator.kv_cache_gib == (cache or max(0.25, needed))
    assert specs.generator.kv_cache_gib >= needed
    planned = memory._memories(specs, machine)
    total = planned["trainer"].total + num_generators * planned["generator"].total
    assert total <= free * GIB and not specs.share_devices


def test_a_model_of_unknown_sizes_is_served_on_a_cpu_as_before(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert _specs(ServeConfig(str(tmp_path)), tmp_path, 64, Host(1, 0.1)).generator.kv_cache_gib == 0.25


def test_a_server_with_a_gpu_for_each_process_fits_them_or_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    two = (GPU("T4", 5.0, (7, 5)),) * 2
    config = ServeConfig(str(tmp_path), context_length=131072, dtype="float32")
    with pytest.raises(
        ConfigError, match=r"GPU \d has 4.6 GiB for processes that need about .* GiB short; use a"
    ):
        _specs(config, tmp_path, 131072, Host(8, 64.0, two))
    large = (GPU("H100", 79.6, (9, 0)),) * 2
    assert _specs(config, tmp_path, 2048, Host(8, 64.0, large)).generator.kv_cache_gib is None


@pytest.mark.parametrize("name", setting_names(ServeConfig("x")))
def test_a_flag_twice_is_refused(name):
    """In either spelling; else the last would win in silence."""
    flag = f"--{name}"
    for again in (flag, flag.replace("_", "-"), f"{flag}=1"):
        with pytest.raises(ConfigError, match=f"^{flag} is given 2 times; give it once$"):
            _serve(["x", flag, "1", again, "1"])
