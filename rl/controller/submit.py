"""`rl train RECIPE --launcher slurm | kubernetes`: hand the run to a scheduler, on hosts that it chooses."""

from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import NoReturn

from rl.cluster.jobs import LAUNCHERS, JobConfig
from rl.cluster.kubernetes_job import KubernetesJob
from rl.cluster.machine import look_at_host
from rl.cluster.slurm_job import SlurmJob
from rl.command_flags import asks_for_help, flag_name, is_flag, take_switch, take_value
from rl.config.flags import override, settings_of, show_help
from rl.config.recipes import from_anywhere, load_recipe
from rl.config.settle import plan_or_problems
from rl.config.validate import check_settings
from rl.controller.plan import describe
from rl.errors import ConfigError
from rl.fields import check_fields
from rl.paths import dated, new_directory
from rl.plan.cluster import Cluster, parse_cluster
from rl.plan.show import PLAN, write_plan

_OF_JOBS = tuple(f"--{name}." for name in LAUNCHERS)
_NOT_OF_JOBS = {
    "--hosts": "the scheduler chooses hosts",
    "--resume": "a job goes on from the newest checkpoint in its run_dir",
}


def is_submitted(arguments: Sequence[str]) -> bool:
    """Whether the words of `rl train` name a launcher, or settings of one."""
    return any(name == "--launcher" or name.startswith(_OF_JOBS) for name in map(flag_name, arguments))


def submit(recipe_name: str, arguments: Sequence[str]) -> int:
    """Write the script or manifest, and submit it.

    With --dry_run it is written, with plan.json, and nothing is started. Prints and exits for --help. Raises
    ConfigError with every problem, RunError where the scheduler refuses.
    """
    launcher, of_job, cluster, is_dry, rest = _split(arguments)
    if asks_for_help(rest):
        _show_help(recipe_name, launcher)
    whole_name = from_anywhere(recipe_name)  # before its code runs, which may change the directory
    recipe, config = load_recipe(recipe_name)
    config, problems = override(config, rest, prog=f"rl train {recipe_name}")
    jobs, wrong = settings_of(JobConfig(), of_job)
    jobs, bounds = check_fields(jobs)
    problems += [*wrong, *bounds]
    for word in of_job:
        if word.startswith("--") and not word.startswith(f"--{launcher}."):
            problems.append(f"{word} has no effect with --launcher {launcher}; leave it out")
    problems += [
        f"{flag} has no effect here: {why}; leave it out"
        for flag, why in _NOT_OF_JOBS.items()
        if flag in map(flag_name, rest) and (flag != "--resume" or config.resume)
    ]
    if cluster and not is_dry:
        problems.append("--cluster has no effect without --dry_run; leave it out")
    if config.resume not in ("", "latest") and "--resume" not in map(flag_name, rest):
        problems.append(
            f"resume={config.resume!r} of {recipe_name} has no effect here: {_NOT_OF_JOBS['--resume']}; "
            f"write --resume '', and begin the run outside of the job, which then goes on with it: "
            f"rl train {recipe_name} --run_dir D --resume {config.resume}"
        )
    problems += check_settings(config, "train")
    if problems:
        raise ConfigError("\n".join(problems))
    job = getattr(jobs, launcher)
    run_dir = job.run_dir(config.run_dir, dated(recipe))
    source = from_anywhere(whole_name, recipe) if job.shares_files else recipe_name
    words, place = _without(_without(rest, "--run_dir"), "--resume"), job.place(run_dir)
    text = job.text(run_dir, job.command(source, words, run_dir))
    file = place / job.file
    hosts = _hosts_of(job, launcher, cluster) if is_dry else None
    result = plan_or_problems(config.without_weights(), "train", hosts) if is_dry else None
    if isinstance(result, list):
        raise ConfigError("\n".join(result))
    try:
        if not config.run_dir:  # another may be submitted in this second
            place = new_directory(place)
            run_dir, file = run_dir.with_name(place.name), place / job.file
            text = job.text(run_dir, job.command(source, words, run_dir))
        place.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if result is not None:
            write_plan(place / PLAN, result)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}); give another --run_dir") from error
    if result is not None:
        print("\n".join(describe(recipe, result)))
        print(f"{file} and plan.json beside it are written; nothing was started")
        return 0
    print(job.submit(file))
    print(f"run directory: {run_dir}; what was submitted: {file}")
    return 0


def _split(arguments: Sequence[str]) -> tuple[str, list[str], str, bool, list[str]]:
    """(launcher, words of the job, --cluster, --dry_run, the others). Raises ConfigError."""
    words = list(arguments)
    launcher = take_value(words, "--launcher", " or --launcher ".join(LAUNCHERS))
    if launcher not in LAUNCHERS:
        raise ConfigError(f"write --launcher {' or --launcher '.join(LAUNCHERS)}, once")
    cluster, is_dry = take_value(words, "--cluster", "'2 x 8xH100-80'"), take_switch(words, "--dry_run")
    groups: list[list[str]] = []
    for word in words:
        if is_flag(word) or not groups:
            _, equals, value = word.partition("=")
            name = flag_name(word) or word
            is_like_a_flag = value.startswith("-")  # taken apart it could be one
            groups.append([f"{name}={value}"] if is_like_a_flag else [name, *([value] if equals else [])])
        else:
            groups[-1].append(word)
    of_job = [word for group in groups if group[0].startswith(_OF_JOBS) for word in group]
    rest = [word for group in groups if not group[0].startswith(_OF_JOBS) for word in group]
    return launcher, of_job, cluster, is_dry, rest


def _show_help(recipe_name: str, launcher: str) -> NoReturn:
    """The job's settings, by the names that the command line has for them."""
    job = getattr(JobConfig(), launcher)
    kind = make_dataclass(JobConfig.__name__, [(launcher, type(job), job)], frozen=True)
    train = f"rl train {recipe_name}"
    show_help(
        kind(),
        f"{train} --launcher {launcher}",
        f"--dry_run writes what would be submitted. The recipe's settings: {train} --help.",
    )


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Without the flag and its one value, which may be a part of its word."""
    kept = list(words)
    for at, word in enumerate(kept):
        if flag_name(word) == flag:
            del kept[at : at + (1 if "=" in word else 2)]
            return kept
    return kept


def _hosts_of(job: SlurmJob | KubernetesJob, launcher: str, cluster: str) -> Cluster:
    """As --cluster says, or as many as the job asks for, each like this one. Raises ConfigError."""
    own_host = look_at_host()
    if not cluster:
        return Cluster((own_host,) * job.nodes)
    hosts = parse_cluster(cluster, own_host)
    num_gpus = max(len(host.gpus) for host in hosts.hosts)
    wanted = {"nodes": (job.nodes, len(hosts.hosts))}
    if job.gpus_per_node:
        wanted["gpus_per_node"] = (job.gpus_per_node, num_gpus)
    if problems := [
        f"{launcher}.{name}={of_job} and --cluster {cluster!r} differ; set --{launcher}.{name} {of_cluster}"
        for name, (of_job, of_cluster) in wanted.items()
        if of_job != of_cluster
    ]:
        raise ConfigError("\n".join(problems))
    return hosts
