"""What `rl serve` is told, and what it refuses before any process starts."""

# holds: exact, sums of whole bytes in float64

import json
import re
import shutil
import socket
from dataclasses import replace

import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")

from rl.cli import _serve
from rl.config.flags import setting_names
from rl.errors import ConfigError
from rl.models.generator.vllm_config import Fill
from rl.models.hf import read_config
from rl.models.layout import Layout
from rl.models.sources import TinyQwen3
from rl.paths import lock_directory
from rl.plan.cluster import GPU, USABLE, Cluster, Host
from rl.plan.memory import GIB, longest_sequence_bytes
from rl.plan.model_shape import ModelShape
from rl.plan.types import Plan
from rl.tinker.base_model import check_base_model
from rl.tinker.database import Database
from rl.tinker.limits import Limits
from rl.tinker.serve import ServeConfig, names_of, serve, settle
from rl.waiting import Deadlines
from tests.tiny import write_model

CPU = Host(8, 64.0)


SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def plan_of(config: ServeConfig, model_dir, context_length: int, host: Host) -> Plan:
    return settle(replace(config, context_length=context_length), read_config(model_dir), Cluster((host,)))


def spec(plan: Plan, role: str):
    return plan.of(role)[0].spec


def test_settings_reach_the_processes(model_dir):
    config = ServeConfig(str(model_dir))
    plain = plan_of(config, model_dir, 64, CPU)
    assert spec(plain, "trainer").config.adapters and spec(plain, "trainer").config.max_seq_len == 64
    assert spec(plain, "generator").config.max_model_len == 64 and spec(plain, "generator").config.stop_texts
    assert (
        not plain.of("reward")
        and plain.of("trainer")[0].max_restarts == plain.of("generator")[0].max_restarts == 1000
    )
    for change, arrives in [
        ({"engine": "hf"}, lambda p: spec(p, "trainer").kind == "hf"),
        (
            {"dtype": "bfloat16"},
            lambda p: spec(p, "trainer").config.dtype == spec(p, "generator").config.dtype == "bfloat16",
        ),
        (
            {"layout": Layout(shard=2)},
            lambda p: p.roles["trainer"] == 2 == spec(p, "trainer").config.layout.shard,
        ),
        ({"num_generators": 3}, lambda p: p.roles["generator"] == 3 == len(p.of("generator"))),
        ({"kv_cache_gib": 0.5}, lambda p: spec(p, "generator").config.kv_cache_gib == 0.5),
        ({"limits": Limits(max_rank=8)}, lambda p: spec(p, "generator").config.max_lora_rank == 8),
        ({"limits": Limits(max_models=3)}, lambda p: spec(p, "generator").config.max_adapters == 3),
        (
            {"deadlines": Deadlines(train=7.0)},
            lambda p: spec(p, "trainer").config.timeout_seconds == 7.0 == p.deadlines.train,
        ),
        ({"deadlines": Deadlines(checkpoint=7.0)}, lambda p: spec(p, "trainer").config.save_seconds == 7.0),
    ]:
        assert not arrives(plain)
        assert arrives(plan_of(replace(config, **change), model_dir, 64, CPU)), change


def test_roles_of_a_server_are_on_the_hosts_that_it_names(model_dir):
    hosts = Cluster((CPU,) * 3)
    config = ServeConfig(str(model_dir), layout=Layout(shard=2), trainer_hosts=(2, 1), generator_hosts=(0,))
    plan = settle(config, read_config(model_dir), hosts)
    places = {role: [p.host for r in plan.of(role) for p in r.processes] for role in ("trainer", "generator")}
    assert places == {"trainer": [2, 1], "generator": [0]}
    with pytest.raises(ConfigError, match="^trainer_hosts names host 3; the 3 hosts are 0 to 2"):
        settle(replace(config, trainer_hosts=(3, 1)), read_config(model_dir), hosts)


@pytest.fixture
def model_dir(tmp_path):
    path = TinyQwen3(alphabet="abcdefgh").materialize(tmp_path)
    write_model(path, vocab_size=64)
    return path


@pytest.mark.parametrize("asked", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@v1"])
def test_a_model_of_the_hub_is_served_under_its_id_and_a_directory_under_its_name(model_dir, asked):
    """The Hub's files lie in a directory that is called by a commit; a client's machine has no such path."""
    snapshot = model_dir.rename(model_dir.parent / "c1899de289a0")
    assert names_of(ServeConfig(asked), snapshot) == (("Qwen/Qwen3-0.6B",), "Qwen/Qwen3-0.6B")
    assert names_of(ServeConfig(asked, names=("mine",)), snapshot) == (("mine",), "Qwen/Qwen3-0.6B")
    of_directory = names_of(ServeConfig(str(snapshot)), snapshot)
    assert of_directory == (("c1899de289a0",), str(snapshot.resolve()))


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


def test_a_directory_goes_on_with_its_own_base_model_alone(tmp_path, model_dir):
    """Wherever the model lies; adapters of one model fit another of its shapes, and mean nothing there."""
    moved = shutil.copytree(model_dir, tmp_path / "moved")
    tuned = shutil.copytree(model_dir, tmp_path / "tuned")
    with (tuned / "model.safetensors").open("r+b") as file:
        weights = file.read()
        file.seek(len(weights) // 2)
        file.write(bytes(byte ^ 1 for byte in weights[len(weights) // 2 :]))
    longer = shutil.copytree(model_dir, tmp_path / "longer")
    config = read_config(longer)
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 7777}))
    database = Database(f"sqlite:///{tmp_path}/server.db")
    for path in (model_dir, moved):
        check_base_model(database, path)
    for path in (tuned, longer):
        with pytest.raises(ConfigError, match="another base model than .*: give another --directory"):
            check_base_model(database, path)
    database.close()
    (tmp_path / "server").mkdir(mode=0o700)
    (tmp_path / "server.db").rename(tmp_path / "server" / "server.db")
    with pytest.raises(ConfigError, match="another base model"):
        serve(ServeConfig(str(tuned), directory=str(tmp_path / "server"), port=0))


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


def on_gpus(plan: Plan) -> dict[int, list]:
    """GPU -> (replica, process) of those there."""
    there: dict[int, list] = {}
    for replica in plan.replicas:
        for process in replica.processes:
            there.setdefault(process.gpus[0], []).append((replica, process))
    return there


@pytest.mark.parametrize("num_generators", range(1, 5))
@pytest.mark.parametrize("num_ranks", range(1, 4))
@pytest.mark.parametrize("num_gpus", range(1, 5))
def test_a_server_starts_on_any_number_of_gpus(model_dir, num_gpus, num_ranks, num_generators):
    """Each process has a GPU that is there; where some share one, both sides know what they may take."""
    host = Host(8, 64.0, (GPU("H100", 78.8, (9, 0)),) * num_gpus)
    config = ServeConfig(str(model_dir), layout=Layout(shard=num_ranks), num_generators=num_generators)
    if num_ranks > num_gpus:
        with pytest.raises(ConfigError, match=f"trainer has {num_ranks} processes and the machine"):
            plan_of(config, model_dir, 64, host)
        return
    plan = plan_of(config, model_dir, 64, host)
    there, shared = on_gpus(plan), num_ranks + num_generators > num_gpus
    assert max(there) < num_gpus and any(len(members) > 1 for members in there.values()) == shared
    cache, budget = (
        spec(plan, "generator").config.kv_cache_gib,
        spec(plan, "trainer").config.device_memory_gib,
    )
    if not shared:
        assert isinstance(cache, Fill) and budget is None
        return
    assert cache > 0 and budget > 0
    beside = max(
        sum(replica.role == "generator" for replica, _ in members)
        for members in there.values()
        if any(replica.role == "trainer" for replica, _ in members)
    )
    assert beside * cache + budget < host.gpus[0].gib


@pytest.mark.parametrize("cache", [0.0, 1e-6, 0.1, 0.5, 1.0, 1.8, 200.0])
@pytest.mark.parametrize("gib", [0.1, 2.0, 4.0, 5.0, 80.0])
@pytest.mark.parametrize(("num_gpus", "num_generators"), [(1, 1), (1, 3), (2, 2), (2, 4)])
def test_a_server_on_shared_gpus_fits_them_or_is_refused(model_dir, cache, gib, num_gpus, num_generators):
    """What is planned for each GPU is at most what it has; else the message says by how much, and what to do."""
    host = Host(8, 64.0, (GPU("H100", gib, (9, 0)),) * num_gpus)
    config = ServeConfig(str(model_dir), num_generators=num_generators, kv_cache_gib=cache)
    try:
        plan = plan_of(config, model_dir, 64, host)
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
    room = gib * USABLE * GIB
    for members in on_gpus(plan).values():
        assert sum(process.peak for _, process in members) <= room
    trainer, generator = plan.of("trainer")[0], plan.of("generator")[0].spec.config
    assert trainer.spec.config.device_memory_gib * GIB >= trainer.processes[0].peak
    shape = ModelShape.of(read_config(model_dir))
    assert generator.kv_cache_gib * GIB >= longest_sequence_bytes(shape, generator)


def test_too_little_memory_for_a_server_is_said_before_anything_starts(model_dir):
    small = Host(8, 64.0, (GPU("T4", 2.0, (8, 0)),))
    for config, remedy in [
        (ServeConfig(str(model_dir)), "use a smaller model"),
        (ServeConfig(str(model_dir), kv_cache_gib=0.5), "lower kv_cache_gib, or use a smaller model"),
    ]:
        with pytest.raises(ConfigError, match=rf"GPU 0 has 1.8 GiB .* need about .* GiB short; {remedy}"):
            plan_of(config, model_dir, 64, small)
    large = Host(8, 64.0, (GPU("H100", 79.6, (9, 0)),))
    asked = plan_of(ServeConfig(str(model_dir), kv_cache_gib=0.5), model_dir, 64, large)
    assert spec(asked, "generator").config.kv_cache_gib == 0.5 and len(on_gpus(asked)[0]) == 2


@pytest.mark.parametrize("cache", [0.0, 0.1, 0.3, 2.0])
@pytest.mark.parametrize("free", [1.0, 4.0, 6.5, 8.0, 64.0])
@pytest.mark.parametrize("context_length", [64, 2048, 8192, 131072])
@pytest.mark.parametrize("num_generators", [1, 3])
def test_a_server_on_a_cpu_fits_it_or_is_refused(tmp_path, context_length, free, cache, num_generators):
    """The cache has room for one sequence, and all processes for what they need; else the message has both figures."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    config = ServeConfig(str(tmp_path), kv_cache_gib=cache, num_generators=num_generators)
    blocks = context_length // 32 + 1  # vLLM keeps one for itself
    needed = blocks * 32 * 2 * 30 * 3 * 64 * 4 / GIB
    try:
        plan = plan_of(config, tmp_path, context_length, Host(8, free))
    except ConfigError as error:
        lines = str(error).splitlines()
        if re.search(r"^[234] processes take [\d.]+ GiB before they load a model", lines[0]):
            assert free == 1.0
            return
        if 0 < cache < needed:
            assert re.search(
                r"^kv_cache_gib=.* is less than one sequence .* takes, [\d.]+ GiB; raise it, or lower context_length",
                lines[0],
            )
        if 0 < cache < needed and len(lines) == 1:
            return
        figures = re.search(
            r"^the server needs about ([\d.]+) GiB \(trainer [\d.]+, generator (?:3 x )?[\d.]+\) but "
            r"([\d.]+) are free, ([\d.]+) GiB short; (.*)use a smaller model, context_length", lines[-1]
        )  # fmt: skip
        planned, there, short = (float(figures[i]) for i in (1, 2, 3))
        assert planned > free == there and short > 0
        assert (figures[4] == "lower kv_cache_gib, or ") == bool(cache)
        return
    settled = spec(plan, "generator").config.kv_cache_gib
    assert settled == (cache or max(0.25, needed)) and settled >= needed
    assert sum(process.peak for replica in plan.replicas for process in replica.processes) <= free * GIB


def test_a_model_of_unknown_sizes_is_served_on_a_cpu(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    plan = plan_of(ServeConfig(str(tmp_path)), tmp_path, 64, Host(1, 2.0))
    assert spec(plan, "generator").config.kv_cache_gib == 0.25


def test_a_server_with_a_gpu_for_each_process_fits_them_or_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    two = (GPU("L4", 5.0, (8, 9)),) * 2
    config = ServeConfig(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"GPU \d has 4.6 GiB for processes that need about .* GiB short; use a"
    ):
        plan_of(config, tmp_path, 131072, Host(8, 64.0, two))
    large = (GPU("H100", 79.6, (9, 0)),) * 2
    assert isinstance(
        spec(plan_of(config, tmp_path, 2048, Host(8, 64.0, large)), "generator").config.kv_cache_gib, Fill
    )
    with pytest.raises(ConfigError, match="^dtype=float32 does not go with adapters on a GPU, .* 16 bits"):
        plan_of(replace(config, dtype="float32"), tmp_path, 2048, Host(8, 64.0, large))


@pytest.mark.parametrize("name", setting_names(ServeConfig("x")))
def test_a_flag_twice_is_refused(name):
    """In either spelling; else the last would win in silence."""
    flag = f"--{name}"
    for again in (flag, flag.replace("_", "-"), f"{flag}=1"):
        with pytest.raises(ConfigError, match=f"^{flag} is given 2 times; give it once$"):
            _serve(["x", flag, "1", again, "1"])
