"""`rl serve`: the actors, the service on them, and the HTTP server, from start to end."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import uvicorn
from fastapi import FastAPI

from rl.bounds import CacheGib, FilePath, Port, PositiveInt
from rl.cluster.hosts import cluster_at
from rl.cluster.launch import launch
from rl.cluster.spawner import spec_of
from rl.errors import ConfigError
from rl.host_protocol import listen
from rl.http_server import KEPT_SECONDS, Server
from rl.hub import hub_id
from rl.models.hf import max_positions, read_config
from rl.models.layout import Layout
from rl.models.sources import ModelDir
from rl.models.tokenizer import HFTokenizer
from rl.observability.timeline import Timeline
from rl.plan.cluster import Cluster
from rl.plan.demand import Demand, DType, Facts, ModelFacts
from rl.plan.resolve import resolve
from rl.plan.sections import GeneratorConfig, Hosts, TrainerConfig
from rl.plan.show import PLAN, settled_line, write_plan
from rl.plan.types import GeneratorSpec, Plan
from rl.processes import on_interrupt
from rl.tinker.actors_backend import ActorsBackend
from rl.tinker.app import make_app
from rl.tinker.base_model import check_base_model
from rl.tinker.database import Database
from rl.tinker.keys import Keys
from rl.tinker.limits import Limits
from rl.tinker.own_directory import own_directory
from rl.tinker.routes import Served
from rl.tinker.service import Service
from rl.types import EngineName, LoRA
from rl.waiting import Deadlines, beside

_LAST_ANSWERS_SECONDS = 2
_MANY_RESTARTS = 1000  # a server outlives many
_NAMES = {
    "trainer.lora.rank": "limits.max_rank",
    "trainer.layout": "layout",
    "trainer.engine": "engine",
    "max_seq_len": "context_length",
    "trainer.micro_batch_tokens": "context_length",
    "generator.kv_cache_gib": "kv_cache_gib",
    "generator.num_replicas": "num_generators",
    "trainer.hosts": "trainer_hosts",
    "generator.hosts": "generator_hosts",
    "generator.cuda_graphs": "cuda_graphs",
}
"""What the server calls a run's settings."""


@dataclass(frozen=True)
class ServeConfig:
    """A Tinker server for one base model."""

    model: Annotated[FilePath, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The base model: a Hugging Face directory, or an id on the Hub."""

    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 lets other machines in."""

    port: Port = 8000
    """0 takes one that is free."""

    api_key_file: FilePath = ""
    """API keys, one a line, with a tenant's name before it or not; read again when it changes; made with one
    new key where it is not there. Empty: DIRECTORY/api_keys."""

    no_api_key: bool = False
    """Serve whoever reaches the port, as one tenant."""

    directory: FilePath = "tinker"
    """Of checkpoints, logs and the database: a server that is started again goes on in it."""

    database: str = ""
    """postgresql://USER:PASSWORD@HOST/NAME, of this server alone; empty: SQLite in the directory."""

    names: tuple[str, ...] = ()
    """Names under which clients may ask for the base model; empty: its id on the Hub, or its directory's
    name."""

    context_length: PositiveInt = 2048
    """Tokens of a prompt with its answer, where the model allows so many."""

    engine: EngineName = "titan"
    """TitanEngine, or HFEngine for architectures that only transformers has."""

    dtype: DType = "auto"
    """In which trainer and generators compute. auto: bfloat16 on GPUs, else float32. fastest: bfloat16 on
    CPUs with instructions for it too."""

    layout: Layout = Layout()
    """How the training engine is spread over processes."""

    num_generators: PositiveInt = 1
    """Generators, each in a process of its own."""

    hosts: str = ""
    """The server's hosts, as 10.0.0.1:7000,10.0.0.2:7000, each with an `rl worker` that listens there. Empty:
    this host alone."""

    trainer_hosts: Hosts = ()
    """Numbers of the hosts that the training engine is spread over: from 0, in --hosts' order. Those have to
    see the directory. None: the Plan chooses."""

    generator_hosts: Hosts = ()
    """As trainer_hosts; the ranks of one generator are on one host."""

    kv_cache_gib: CacheGib = 0.0
    """Of each generator; 0: on a GPU what is free, else 0.25, or what one sequence takes if that is more."""

    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Generators decode by CUDA graphs. auto: on a GPU."""

    max_body_mib: PositiveInt = 64
    """Largest request."""

    limits: Limits = field(default_factory=Limits)
    deadlines: Deadlines = Deadlines()


def serve(config: ServeConfig) -> int:
    """Until SIGINT, SIGTERM or SIGHUP, which are a good end once it serves.

    Raises ConfigError before any process starts.
    """
    source = ModelDir(config.model)
    if problems := source.validate():
        raise ConfigError("\n".join(problems))
    if odd := [name for name in config.names if ":" in name or name.count("/") == 2]:
        raise ConfigError(f"names={odd[0]!r}: the SDK takes no name with a colon or two slashes")
    if any(not name.strip() for name in config.names) or len(set(config.names)) < len(config.names):
        raise ConfigError(f"names={config.names} has an empty name, or one twice; give each once")
    if config.no_api_key and config.api_key_file:
        raise ConfigError("api_key_file has no effect with no_api_key=True; leave one of them out")
    missing = sorted(set(LoRA.targets) - source.linear_layers())
    if missing:
        raise ConfigError(f"model {config.model} has no layers called {missing}, which Tinker's LoRA trains")
    directory = Path(config.directory)
    with own_directory(directory):
        asyncio.run(_interruptible(_main(config, Path(source.directory), directory)))
    return 0


async def _interruptible(main: Coroutine[Any, Any, None]) -> None:
    """A signal while it starts ends its processes too; later ones are `_listen`'s."""
    starting, came = asyncio.ensure_future(main), list[int]()

    def interrupt(number: int) -> None:
        came.append(number)
        starting.cancel()

    on_interrupt(interrupt)
    try:
        await starting
    except asyncio.CancelledError:
        raise KeyboardInterrupt(*came[:1]) from None


async def _main(config: ServeConfig, model_dir: Path, directory: Path) -> None:
    hf_config = read_config(model_dir)
    vocab_size = hf_config["vocab_size"]
    key_file = Path(config.api_key_file or directory / "api_keys")
    keys = None if config.no_api_key else Keys(key_file)
    names, tokenizer_id = names_of(config, model_dir)
    listener = _bind(config.host, config.port)
    port = listener.getsockname()[1]
    plan = settle(config, hf_config, cluster_at(config.hosts))
    context_length = plan.max_seq_len
    keys_are = "no API key is asked for" if config.no_api_key else f"API keys: {key_file}"
    database = Database(config.database or f"sqlite:///{directory.absolute()}/server.db")
    tokenizer, timeline = HFTokenizer(model_dir), Timeline()
    with contextlib.closing(database), listener:
        check_base_model(database, model_dir)
        write_plan(directory / PLAN, plan)
        print(settled_line(plan, directory / PLAN))
        print("starting the training engine and the generators ...", flush=True)
        async with launch(plan, {"model": model_dir}, directory, timeline=timeline) as actors:
            await actors.publish(0)  # the base model, which stays
            await actors.generators.wait_served(0)
            backend = ActorsBackend(actors, names[0], context_length, vocab_size)
            eos_ids = _eos_ids(model_dir, tokenizer.eos_id)
            capacity = sum(spec_of(r, GeneratorSpec).config.max_num_seqs for r in plan.of("generator"))
            shared = config.limits.shared_samples or (64 if plan.cluster.gpus else 8) * config.num_generators
            service = Service(database, backend, directory, names, eos_ids, config.limits, capacity, shared)
            architecture = hf_config["model_type"]
            served = Served(names, tokenizer_id, architecture, context_length)
            app = make_app(service, keys, served, config.max_body_mib, tokenizer)
            async with beside(service.run(), _forget(timeline)):
                print(f"serving {', '.join(names)} at http://{config.host}:{port}; {keys_are}", flush=True)
                await _listen(app, listener)


def names_of(config: ServeConfig, model_dir: Path) -> tuple[tuple[str, ...], str]:
    """What clients call the base model, and from where they load its tokenizer."""
    directory = model_dir.resolve()
    id = hub_id(config.model)
    return config.names or (id or directory.name,), id or str(directory)


def _bind(host: str, port: int) -> socket.socket:
    """Before anything starts, so that a port that is taken costs no time. Raises ConfigError."""
    try:
        return listen(host, port, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error}); give another host or port"
        ) from error


async def _listen(app: FastAPI, listener: socket.socket) -> None:
    """Until a signal."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=_LAST_ANSWERS_SECONDS,
        timeout_keep_alive=KEPT_SECONDS,
    )
    server = Server(config)
    on_interrupt(lambda number: server.stop())
    await server.serve(sockets=[listener])


def demand_of(config: ServeConfig, positions: int) -> Demand:
    """What a server asks for. positions: the model's."""
    return Demand(
        command="serve",
        trainer=TrainerConfig(
            engine=config.engine,
            layout=config.layout,
            micro_batch_tokens=min(config.context_length, positions),
            max_restarts=_MANY_RESTARTS,
        ),
        max_seq_len=config.context_length,
        generator=GeneratorConfig(
            num_replicas=config.num_generators,
            kv_cache_gib=config.kv_cache_gib,
            cuda_graphs=config.cuda_graphs,
            max_restarts=_MANY_RESTARTS,
        ),
        dtype=config.dtype,
        hosts={"trainer": config.trainer_hosts, "generator": config.generator_hosts},
        overlap=False,  # clients often sample and train in turn: each may have all cores
        deadlines=config.deadlines,
        clients_adapters=LoRA(rank=config.limits.max_rank),
        max_adapters=config.limits.max_models,
        stop_texts=True,
        scaled_logprobs=True,
        names=_NAMES,
    )


def settle(config: ServeConfig, hf_config: Mapping[str, Any], cluster: Cluster) -> Plan:
    """hf_config: the contents of config.json. Raises ConfigError with every problem, one a line."""
    positions = max_positions({**hf_config})
    facts = ModelFacts.of(hf_config, positions)
    demand = demand_of(config, positions)
    plan = resolve(demand, Facts({"trainer": facts, "generator": facts}), cluster)
    if not isinstance(plan, Plan):
        raise ConfigError("\n".join(problem.text for problem in plan))
    return plan


def _eos_ids(model_dir: Path, eos_id: int) -> tuple[int, ...]:
    """The tokenizer's, and those of generation_config.json."""
    ids = {eos_id}
    path = model_dir / "generation_config.json"
    if path.is_file():
        more = json.loads(path.read_text()).get("eos_token_id")
        ids |= set(more if isinstance(more, list) else [] if more is None else [more])
    return tuple(sorted(ids))


async def _forget(timeline: Timeline) -> None:
    """What nobody will ask it for."""
    while True:
        await asyncio.sleep(60.0)
        timeline.skip()
