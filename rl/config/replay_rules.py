"""What `rl replay` needs of a run: a checkpoint before the step, and the batches from there on."""

from rl.config.run import RunConfig

NEEDS = (
    "needs a run with --record_batches at least --save_every: the batches from a checkpoint on to step N; "
    "--keep_checkpoints 0 keeps all checkpoints"
)


def check_replay(config: RunConfig) -> list[str]:
    """Why no replay could use the batches that the run keeps, in one line; empty if one could."""
    kept, last = config.record_batches, config.steps
    if not kept:
        return []
    if config.keep_checkpoints == 1:
        return [
            f"record_batches={kept} has no effect with keep_checkpoints=1, which keeps the last step's: "
            f"rl replay goes on from one before it; set keep_checkpoints to 2"
        ]
    if config.save_every_minutes:
        return []
    before = _checkpoint_before_the_last(config)
    if not before:
        return [
            f"record_batches={kept} has no effect with save_every={config.save_every}, which saves no step "
            f"before the last: rl replay goes on from one; set save_every below steps={last}"
        ]
    if kept < last - before:
        return [
            f"record_batches={kept} keeps what steps {last - kept + 1} to {last} learned from, and rl replay "
            f"goes on from the checkpoint of step {before}; set record_batches to at least {last - before}"
        ]
    return []


def what_a_replay_needs(config: RunConfig, resumed_at: int = 0, in_place: bool = True) -> list[str]:
    """Lines for a run that keeps batches: which steps can be done again after its end.

    in_place: the run's directory has the checkpoint of the step that it goes on from.
    """
    kept, last, before = config.record_batches, config.steps, _checkpoint_before_the_last(config)
    if not kept:
        return []
    if in_place:
        before, left = max(before, resumed_at if resumed_at < last else 0), last
    else:
        before, left = before if before > resumed_at else 0, last - resumed_at
    by_time, many = f"save_every_minutes={config.save_every_minutes:g}", f"record_batches={kept}"
    if left == 1:
        return [f"{many}: rl replay can do no step again, as this run has no checkpoint before its only one"]
    if not before:
        saves = f"only {by_time} may save" if config.save_every_minutes else "this run saves none of"
        return [
            f"{many}: rl replay needs a checkpoint from before the last step, which {saves}; to be sure, set "
            f"save_every below {left}, and record_batches as large"
        ]
    if kept < last - before:
        return [
            f"{many}: rl replay needs a checkpoint within the last {kept} steps, which only {by_time} may "
            f"save; to be sure, set record_batches of at least {last - before}, so that it can go on from "
            f"step {before}"
        ]
    if config.save_every_minutes and 0 < config.keep_checkpoints < last:
        return [
            f"{many}: rl replay goes on from a checkpoint that is kept, and those of {by_time} may take the "
            f"place of step {before}'s; to be sure, set keep_checkpoints=0, which keeps all"
        ]
    return [f"rl replay RUN --step N will do steps {before + 1} to {last} again, from the checkpoint before"]


def _checkpoint_before_the_last(config: RunConfig) -> int:
    """The newest step before the last that save_every saves; 0 for none."""
    return (config.steps - 1) // config.save_every * config.save_every if config.save_every else 0
