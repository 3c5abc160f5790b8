"""Launch: which process runs what, on which device, with how many threads; and the end of all of them.

The only place that writes to an environment.
"""

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rl.actors.generator import Generator, GeneratorPool
from rl.actors.remote import call
from rl.actors.reward import RewardPool, RewardWorker
from rl.actors.trainer import PolicyTrainer, TrainerHandle
from rl.controller.config import RunConfig
from rl.interfaces import Transport
from rl.models.engine_config import EngineConfig
from rl.models.generator_env import generator_environment
from rl.models.hf import max_positions
from rl.processes import adopt_orphans
from rl.types import POLICY, PolicyVersion
from rl.weight_sync.shared_memory import SharedMemory

_STOP_SECONDS = 4.0
_SHARED_ROOT = Path("/dev/shm")


@dataclass(frozen=True)
class Fleet:
    """The running actors of a run."""

    trainer: TrainerHandle
    generators: GeneratorPool
    rewards: RewardPool
    adapter: str | None  # what the policy is sampled with: its LoRA adapter, where it has one

    async def publish(self, version: PolicyVersion) -> None:
        """Every generator switches to the trainer's weights; returns when all have."""
        await self.generators.load_weights(await self.trainer.push_weights(version))


@asynccontextmanager
async def launch(config: RunConfig, model_dir: Path, run_dir: Path) -> AsyncIterator[Fleet]:
    """Start every process of the run and wait until each is ready; on the way out, end them all and free shared memory."""
    # Find a dead process within a second; Monarch's default is up to ten.
    os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
    import monarch.actor

    failures = run_dir / "logs" / "failures.log"
    failures.parent.mkdir(parents=True, exist_ok=True)
    # By default Monarch ends the controller when any process dies; here the calls to that process fail instead.
    monarch.actor.unhandled_fault_hook = lambda failure: _append(failures, f"{failure}\n")

    adopt_orphans()
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    shared = make_shared_directory(run_dir.name)
    meshes: list[Any] = []
    try:
        fleet = await _start(config, model_dir, run_dir, shared, meshes)
        yield fleet
    finally:
        try:
            await asyncio.shield(_stop(meshes))
        finally:
            kill_children(others)
            shutil.rmtree(shared, ignore_errors=True)


async def _start(config: RunConfig, model_dir: Path, run_dir: Path, shared: Path, meshes: list[Any]) -> Fleet:
    from monarch.spmd import setup_torch_elastic_env_async

    layout, replicas, deadline = config.trainer.layout, config.generator.num_replicas, config.launch.deadline_seconds
    threads = {"trainer": _threads(layout.num_procs), "generator": _threads(replicas)}
    logs = run_dir / "logs"

    def spawn(name: str, num_procs: int, env: dict[str, str], first_device: int | None) -> Any:
        mesh = _spawn_procs(name, num_procs, env, first_device, logs)
        meshes.append(mesh)
        return mesh

    trainer_procs = spawn("trainer", layout.num_procs, {"OMP_NUM_THREADS": str(threads["trainer"])}, 0)
    generator_procs = spawn("generator", replicas, generator_environment(threads["generator"], config.generator.compile), layout.num_procs)
    reward_procs = spawn("reward", config.reward.num_procs, {"OMP_NUM_THREADS": "1"}, None)

    transport: Transport = SharedMemory(str(shared))
    if config.weight_sync.transport == "torchstore":
        from rl.weight_sync.torchstore import TorchStore  # not a part of every installation

        store = spawn("store", 1, {"OMP_NUM_THREADS": "1"}, None)
        transport = await call(TorchStore.create(store), "torchstore", deadline)
    # One host: a free port of the loopback interface.
    address = ("localhost", _free_port())
    await call(setup_torch_elastic_env_async(trainer_procs, *address), "trainer start", deadline)
    engine = (config.trainer.engine, str(model_dir), engine_config(config), config.trainer.lora, config.seed)
    trainer = trainer_procs.spawn("trainer", PolicyTrainer, *engine, transport)
    generators = generator_procs.spawn("generator", Generator, generator_args(config, model_dir), transport)
    rewards = reward_procs.spawn("reward", RewardWorker, config.env, config.reward.limit_seconds)
    fleet = Fleet(
        TrainerHandle(trainer, layout, config.trainer.lora, deadline),
        GeneratorPool(generators, replicas, deadline),
        RewardPool(rewards, config.reward.num_procs, deadline),
        POLICY if config.trainer.lora.rank else None,
    )
    await asyncio.gather(fleet.trainer.ready(), fleet.generators.ready(), fleet.rewards.ready())
    if config.trainer.lora.rank:  # the model never changes: it is sent once, and only its adapter afterwards
        await fleet.generators.load_weights(await fleet.trainer.push_base())
        await fleet.trainer.release_base()
    return fleet


def engine_config(config: RunConfig) -> EngineConfig:
    trainer = config.trainer
    return EngineConfig(
        layout=trainer.layout,
        dtype=config.dtype,
        activation_checkpointing=trainer.activation_checkpointing,
        max_seq_len=trainer.max_tokens,
        adapters=trainer.lora.rank > 0,
        float8=trainer.float8,
        compile=trainer.compile,
        seed=config.seed if config.model.random_weights else None,
        timeout_seconds=config.launch.deadline_seconds,
    )


def generator_args(config: RunConfig, model_dir: Path) -> dict[str, Any]:
    return {
        "model_dir": str(model_dir),
        "dtype": config.dtype,
        "max_model_len": min(max_positions(config.model.config()), config.trainer.max_tokens),
        "max_num_seqs": config.generator.max_num_seqs,
        "kv_cache_gib": config.generator.kv_cache_gib,
        "compile": config.generator.compile,
        "max_lora_rank": config.trainer.lora.rank,
    }


def _spawn_procs(name: str, num_procs: int, env: dict[str, str], first_device: int | None, logs: Path) -> Any:
    """A mesh with the one dimension `procs`. Each process writes to logs/<name>-<rank>.log and sees one GPU, if any."""
    from monarch.actor import default_bootstrap_cmd, this_host

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]

    def command(point: Any) -> Any:
        device = {}
        if torch.cuda.is_available():
            device["CUDA_VISIBLE_DEVICES"] = "" if first_device is None else visible[first_device + point.rank]
        return default_bootstrap_cmd().with_env(env | device)

    return this_host().spawn_procs(
        per_host={"procs": num_procs}, name=name, bootstrap=_prepare_process(name, str(logs.resolve())), bootstrap_command=command
    )


def _prepare_process(name: str, logs: str) -> Callable[[], None]:
    """What each new process runs first."""

    def prepare() -> None:
        import os

        from monarch.actor import current_rank

        from rl.processes import end_with_parent

        end_with_parent()
        log = os.open(f"{logs}/{name}-{current_rank().rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)

    return prepare


async def _stop(meshes: list[Any]) -> None:
    """Ask the processes to end. Those that cannot answer, as a rank in a collective, are ended by force afterwards."""
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(_stop_mesh(mesh) for mesh in meshes), return_exceptions=True), _STOP_SECONDS)


async def _stop_mesh(mesh: Any) -> None:
    await mesh.stop("the run is over")


def kill_children(others: set[int]) -> None:
    """End every descendant but `others`; orphans of those that end become children of this process, hence the second look."""
    for _ in range(2):
        children = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=2)


def make_shared_directory(run_name: str) -> Path:
    """A directory in shared memory that carries this process's pid; those of processes that are gone are removed."""
    for stale in _SHARED_ROOT.glob("rl-*-*"):
        pid = stale.name.split("-")[1]
        if pid.isdigit() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(stale, ignore_errors=True)
    path = _SHARED_ROOT / f"rl-{os.getpid()}-{run_name}"
    path.mkdir()
    return path


def _threads(num_procs: int) -> int:
    """Threads for each process of a mesh: trainer and generators take turns, so each mesh may use every core."""
    return max(1, (os.cpu_count() or 1) // num_procs)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
