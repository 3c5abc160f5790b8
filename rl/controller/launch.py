"""Launch: which process runs what, on which device, with how many threads; and the end of all of them.

The only place that writes to an environment.
"""

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from rl.actors.engine import EngineActor, EngineHandle
from rl.actors.generator import Generator, GeneratorPool
from rl.actors.reference import Reference, ReferenceAdapter, ReferenceMesh
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

ENGINE_ROLES = ("trainer", "critic", "reference")
_STOP_SECONDS = 4.0
_SHARED_ROOT = Path("/dev/shm")


@dataclass(frozen=True)
class Fleet:
    """The running actors of a run."""

    trainer: TrainerHandle
    generators: GeneratorPool
    rewards: RewardPool
    reference: Reference | None  # where the loss or the KL penalty asks for one
    reference_kind: str
    critic: EngineHandle | None  # where the advantage estimator asks for one
    adapter: str | None  # what the policy is sampled with: its LoRA adapter, where it has one

    async def publish(self, version: PolicyVersion) -> None:
        """Every generator switches to the trainer's weights; returns when all have."""
        await self.generators.load_weights(await self.trainer.push_weights(version))

    async def begin_at_policy(self, run_dir: Path, *, teacher: bool) -> None:
        """Critic and reference, unless it is a teacher, take over the policy's weights."""
        if self.reference is not None and not teacher:
            await self.reference.refresh(0)
        if self.critic is not None:
            path = run_dir / "warm_start"
            await self.trainer.save_hf(str(path / "hf"))
            await self.critic.load_weights(str(path / "hf"))
            shutil.rmtree(path)

    async def save_checkpoint(self, path: Path, step: int, keep_last: int) -> None:
        """The critic's first, and one more of them is kept: where the policy's is complete, so is the critic's."""
        if self.critic is not None:
            await self.critic.save_checkpoint(str(critic_path(path)), {}, keep_last + 1 if keep_last else 0, wait=True)
        state = {"step": step, "reference": [self.reference_kind, self.reference.keep(path) if self.reference else ""]}
        await self.trainer.save_checkpoint(str(path), state, keep_last)

    async def load_checkpoint(self, path: str) -> int:
        """Policy, critic and reference as they were when it was written. Returns its step."""
        state = await self.trainer.load_checkpoint(path)
        if self.critic is not None:
            await self.critic.load_checkpoint(str(critic_path(Path(path))))
        if self.reference is not None:
            await self.reference.restore(state["reference"][1])
        return state["step"]


def critic_path(path: Path) -> Path:
    """The critic's checkpoint beside the policy's."""
    return path.parent.with_name("critic_checkpoints") / path.name


def processes(config: RunConfig) -> dict[str, int]:
    """Role -> number of processes, in the order in which devices are dealt out; reward processes get none."""
    roles = {"trainer": config.trainer.layout.num_procs, "generator": config.generator.num_replicas}
    if config.needs_critic:
        roles["critic"] = config.critic.layout.num_procs
    if config.needs_reference and not config.reference_is_adapter:
        roles["reference"] = config.reference.layout.num_procs
    return roles | {"reward": config.reward.num_procs}


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
    """meshes: takes every mesh as soon as it exists, so that a failure half-way ends them too."""
    deadline = config.launch.deadline_seconds
    procs = _spawn_roles(config, run_dir / "logs", meshes)
    transport: Transport = SharedMemory(str(shared))
    if config.weight_sync.transport == "torchstore":
        from rl.weight_sync.torchstore import TorchStore  # not a part of every installation

        meshes.append(_spawn_procs("store", 1, {"OMP_NUM_THREADS": "1"}, None, run_dir / "logs"))
        transport = await call(TorchStore.create(meshes[-1]), "torchstore", deadline)
    await _join_groups(procs, deadline)

    policy, lora, kind = engine_config(config), config.trainer.lora, config.trainer.engine
    arguments = (kind, str(model_dir), policy, lora, config.reference_is_adapter, config.seed, transport)
    trainer = TrainerHandle(procs["trainer"].spawn("trainer", PolicyTrainer, *arguments), policy, lora, deadline)
    generators = procs["generator"].spawn("generator", Generator, generator_args(config, model_dir), transport)
    rewards = procs["reward"].spawn("reward", RewardWorker, config.env, config.reward.limit_seconds)

    def engine(role: str, directory: Path, settings: EngineConfig) -> EngineHandle:
        return EngineHandle(role, procs[role].spawn(role, EngineActor, kind, str(directory), settings), settings, deadline)

    critic = engine("critic", model_dir, critic_config(config)) if "critic" in procs else None
    reference: Reference | None = ReferenceAdapter(trainer) if config.reference_is_adapter else None
    if "reference" in procs:
        teacher = config.reference.model
        directory = model_dir if teacher is None else teacher.materialize(run_dir / "teacher")
        reference = ReferenceMesh(engine("reference", directory, reference_config(config)), trainer, run_dir / "reference")
    pools = GeneratorPool(generators, config.generator.num_replicas, deadline), RewardPool(rewards, config.reward.num_procs, deadline)
    fleet = Fleet(trainer, *pools, reference, config.reference_kind, critic, POLICY if lora.rank else None)
    await asyncio.gather(*(part.ready() for part in (trainer, *pools, reference, critic) if part is not None))
    if lora.rank:  # the model never changes: it is sent once, and only its adapter afterwards
        await fleet.generators.load_weights(await trainer.push_base())
        await trainer.release_base()
    return fleet


def _spawn_roles(config: RunConfig, logs: Path, meshes: list[Any]) -> dict[str, Any]:
    procs: dict[str, Any] = {}
    roles, first_device = processes(config), 0
    for role, count in roles.items():
        # Trainer and critic learn at the same time; a reference's forward pass meets those of both.
        beside = {"reward": (), "reference": ENGINE_ROLES}.get(role, ("trainer", "critic"))
        env = {"OMP_NUM_THREADS": str(_threads(sum(roles.get(other, 0) for other in beside))) if beside else "1"}
        if role == "generator":
            env = generator_environment(_threads(count), config.generator.compile)
        procs[role] = _spawn_procs(role, count, env, None if role == "reward" else first_device, logs)
        meshes.append(procs[role])
        first_device += count
    return procs


async def _join_groups(procs: dict[str, Any], deadline: float) -> None:
    """Each mesh of an engine gets a process group of its own. One host: free ports of the loopback interface."""
    from monarch.spmd import setup_torch_elastic_env_async

    engines = [role for role in ENGINE_ROLES if role in procs]
    for role, port in zip(engines, _free_ports(len(engines)), strict=True):
        await call(setup_torch_elastic_env_async(procs[role], "localhost", port), f"{role} start", deadline)


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


def critic_config(config: RunConfig) -> EngineConfig:
    """All of it learns, also where the policy is an adapter."""
    return replace(engine_config(config), layout=config.critic.layout, adapters=False, head="value")


def reference_config(config: RunConfig) -> EngineConfig:
    """With `adapters`, of which it gets none, nothing learns: the weights are there once, in the compute dtype."""
    source = config.reference.model or config.model
    seed = config.seed if source.random_weights else None
    return replace(engine_config(config), layout=config.reference.layout, adapters=True, seed=seed)


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
    """Threads for each of the processes that compute at the same time; engines and generators take turns on every core.

    With more threads than cores OpenMP's threads spin while they wait for each other: PPO's updates took ten times as long.
    """
    return max(1, (os.cpu_count() or 1) // num_procs)


def _free_ports(count: int) -> list[int]:
    """All different: each is held until the last is found."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("localhost", 0))
        return [probe.getsockname()[1] for probe in sockets]


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
