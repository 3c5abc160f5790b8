"""What keeps a run off a machine: too few devices or cores, too little memory, GPUs that lack a feature."""

from collections.abc import Iterator
from dataclasses import replace

from rl.cluster.machine import Machine
from rl.controller.config import RunConfig
from rl.controller.device_defaults import by_device
from rl.controller.memory_plan import USABLE, Process, num_device_procs, on_devices, processes
from rl.controller.specs import generator_config, judge_config, roles
from rl.errors import ConfigError
from rl.models.hf_checks import check_expert_width
from rl.plan.memory import GIB, ModelShape, longest_sequence_bytes

_GIB_PER_PROCESS = 1.0  # what a process with torch and vLLM or torchtitan takes before it loads a model
_PROCESSES_PER_CORE = 4
_BFLOAT16 = (8, 0)  # compute capabilities from which on GPUs have it
_FLOAT8 = (8, 9)


def check_devices(config: RunConfig, machine: Machine, model_known: bool = True) -> list[str]:
    """One line for each problem. The config's settings by device are known (by_device).

    model_known: the model's config.json can be read.
    """
    found = _gpus_or_cpu(config, machine)
    if found or not model_known:
        return found
    try:
        before = _adapter_of_experts(config, machine) or _expert_width(config) or _sequence(config)
        return before or _too_large(config, machine)
    except ConfigError:  # no decoder of attention layers: its sizes are not known, and nothing is claimed
        return []


def _gpus(config: RunConfig, machine: Machine) -> list[str]:
    found, gpus = [], len(machine.gpus)
    counts = {role: count for role, count in roles(config).items() if role != "reward"}
    if config.placement == "separate" and (needed := num_device_procs(counts)) > gpus:
        parts = " + ".join(f"{role} {count}" for role, count in counts.items())
        found.append(
            f"{needed} processes ({parts}) need a GPU each but the machine has {gpus}; use fewer, or set "
            f"--placement shared"
        )
    together = counts | {"generator": config.generator.tensor_parallel}  # replicas may share
    if "judge" in counts:
        together["judge"] = config.judge.tensor_parallel
    found += [
        f"{role} has {count} processes and the machine {gpus} GPU{'s' * (gpus > 1)}: those of one role "
        f"cannot share; use fewer"
        for role, count in together.items()
        if count > gpus
    ]
    weakest = min(machine.gpus, key=lambda gpu: gpu.capability)
    is_old = f"this is a {weakest.name}, {weakest.capability[0]}.{weakest.capability[1]}"
    if config.dtype == "bfloat16" and weakest.capability < _BFLOAT16:
        found.append(
            f"dtype=bfloat16 needs GPUs of compute capability 8.0 or more ({is_old}); set --dtype float32"
        )
    if config.trainer.float8 and weakest.capability < _FLOAT8:
        found.append(
            f"trainer.float8=True needs GPUs of compute capability 8.9 or more ({is_old}); set it to False"
        )
    elif config.trainer.float8 and not config.trainer.compile:
        found.append(
            "trainer.float8=True without trainer.compile is slower than bfloat16 on a GPU; set "
            "--trainer.compile True"
        )
    return found


def _cpu(config: RunConfig, machine: Machine) -> list[str]:
    total, free = sum(roles(config).values()), machine.free_gib
    most = min(int(free / _GIB_PER_PROCESS), machine.num_cores * _PROCESSES_PER_CORE)
    if config.placement == "shared":
        return ["placement=shared has no effect without GPUs; leave it out"]
    if config.generator.cuda_graphs == "on":
        return ["generator.cuda_graphs=on needs a GPU; set it to off"]
    if total > most:
        return [
            f"{total} processes are more than this machine can hold ({machine.num_cores} cores, {free:.0f} "
            f"GiB free: at most {most}); use fewer"
        ]
    if config.generator.block_size % 32:
        return [
            f"generator.block_size={config.generator.block_size} is not a multiple of 32, as on a CPU it has "
            f"to be"
        ]
    cache = config.generator.num_replicas * config.generator.kv_cache_gib
    if cache > free:
        return [
            f"generator.kv_cache_gib={config.generator.kv_cache_gib:g} needs {cache:g} GiB but {free:.0f} "
            f"are free; use less"
        ]
    return []


def _adapter_of_experts(config: RunConfig, machine: Machine) -> list[str]:
    """vLLM 0.32 samples with an adapter beside experts by kernels of Triton's, which has no CPU."""
    if machine.gpus or not config.trainer.lora.rank:
        return []
    if not ModelShape.of(config.model.config()).num_moe_layers:
        return []
    return [
        f"trainer.lora.rank={config.trainer.lora.rank} of a model with experts needs a GPU, because vLLM's "
        f"kernels do; set it to 0"
    ]


def _expert_width(config: RunConfig) -> list[str]:
    try:
        if config.trainer.engine == "titan":
            tensor_parallel = config.trainer.layout.tensor_parallel
            check_expert_width(config.model.config(), config.dtype, tensor_parallel)
    except ConfigError as error:
        return [str(error)]
    return []


def _sequence(config: RunConfig) -> list[str]:
    """vLLM does not start with a cache under one sequence. Without a size it takes all it finds."""
    asked = [("generator", config.model, generator_config(config), "trainer.max_tokens")]
    if (judge := judge_config(config)) is not None:
        assert config.judge.model is not None
        asked.append(("judge", config.judge.model, judge, "judge.max_tokens"))
    found = []
    for role, model, vllm, longest in asked:
        given: float = getattr(config, role).kv_cache_gib
        needed = longest_sequence_bytes(ModelShape.of(model.config()), vllm) / GIB
        if 0 < given < needed:  # below 0 the other roles leave nothing: _too_large says so
            found.append(
                f"{role}.kv_cache_gib={given:g} is less than one sequence of {vllm.max_model_len} tokens "
                f"takes, {needed:.2f} GiB; raise it, or lower {longest}"
            )
    return found


def _too_large(config: RunConfig, machine: Machine) -> list[str]:
    """What does not fit into memory, with the figures and a setting that would make it fit."""
    problem = _does_not_fit(config, machine)
    return [f"{problem}; {remedy(config, machine)}"] if problem else []


def _does_not_fit(config: RunConfig, machine: Machine) -> str:
    """The fullest device, or the host, where it is too full; else nothing."""
    planned = processes(config, machine)
    if not machine.gpus:
        needed = sum(process.memory.total for process in planned) / GIB
        if needed <= machine.free_gib:
            return ""
        return f"the run needs about {needed:.1f} GiB ({_list(planned)}) but {machine.free_gib:.1f} are free"
    fullest, problem = 0.0, ""
    for device, those in on_devices(planned).items():
        room = machine.gpus[device].gib * USABLE
        needed = sum(process.memory.total for process in those) / GIB
        no_cache = any(p.role == "generator" for p in those) and config.generator.kv_cache_gib < 0
        if (needed > room or no_cache) and needed > fullest:
            fullest = needed
            cache = f", {-config.generator.kv_cache_gib:.1f} GiB short of any cache" * no_cache
            problem = (
                f"GPU {device} has {room:.1f} GiB for processes that need about "
                f"{needed - min(0, config.generator.kv_cache_gib):.1f} ({_list(those)}){cache}"
            )
    return problem


def _list(those: list[Process]) -> str:
    counts: dict[str, list[Process]] = {}
    for process in those:
        counts.setdefault(process.role, []).append(process)
    return ", ".join(
        f"{role} {f'{len(of)} x ' if len(of) > 1 else ''}{of[0].memory.total / GIB:.1f}"
        for role, of in counts.items()
    )


def remedy(config: RunConfig, machine: Machine) -> str:
    """The first change that would make it fit."""
    for text, changed in _changes(config, machine):
        try:
            if not _gpus_or_cpu(changed, machine) and not _does_not_fit(changed, machine):
                return text
        except (ConfigError, ValueError):
            continue
    return "use a smaller model, or more devices"


def _gpus_or_cpu(config: RunConfig, machine: Machine) -> list[str]:
    return _gpus(config, machine) if machine.gpus else _cpu(config, machine)


def _changes(config: RunConfig, machine: Machine) -> Iterator[tuple[str, RunConfig]]:
    """From the mildest on: what to say, and the config with it."""

    def trainer(**settings: object) -> RunConfig:
        return again(replace(config, trainer=replace(config.trainer, **settings)))  # type: ignore[arg-type]

    def again(changed: RunConfig) -> RunConfig:
        """A cache that was worked out is worked out once more."""
        if changed.placement == "shared" and changed.generator.kv_cache_gib < 0:
            changed = replace(changed, generator=replace(changed.generator, kv_cache_gib=0.0))
        return by_device(changed, machine)

    if config.trainer.activation_checkpointing != "full":
        yield (
            "set --trainer.activation_checkpointing full",
            trainer(activation_checkpointing="full"),
        )
    smallest = config.env.max_new_tokens * 2
    tokens = config.trainer.max_tokens // 2
    while tokens >= smallest:
        yield (
            f"set --trainer.max_tokens {tokens} and --trainer.activation_checkpointing full",
            trainer(max_tokens=tokens, activation_checkpointing="full"),
        )
        tokens //= 2
    shard = config.trainer.layout.shard * 2
    while machine.gpus and shard <= len(machine.gpus):
        layout = replace(config.trainer.layout, shard=shard)
        yield f"set --trainer.layout.shard {shard}", trainer(layout=layout)
        yield (
            f"set --trainer.layout.shard {shard} and --trainer.activation_checkpointing full",
            trainer(layout=layout, activation_checkpointing="full"),
        )
        shard *= 2
    ranks = config.generator.tensor_parallel * 2
    while machine.gpus and ranks <= len(machine.gpus):
        generator = replace(config.generator, tensor_parallel=ranks)
        yield f"set --generator.tensor_parallel {ranks}", again(replace(config, generator=generator))
        ranks *= 2
    lora = replace(config.trainer.lora, rank=16)
    if not config.trainer.lora.rank:
        yield "set --trainer.lora.rank 16", trainer(lora=lora)
        yield (
            "set --trainer.lora.rank 16 and --trainer.activation_checkpointing full",
            trainer(lora=lora, activation_checkpointing="full"),
        )
