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


def what_a_replay_needs(config: RunConfig) -> list[str]:
    """Lines for a run that keeps batches: which steps can be done again after its end."""
    kept, last, before = config.record_batches, config.steps, _checkpoint_before_the_last(config)
    if not kept:
        return []
    if before and kept >= last - before:
        return [
            f"rl replay RUN --step N will do steps {before + 1} to {last} again, from the checkpoint before"
        ]
    least = f" of at least {last - before}, so that it can go on from step {before}" if before else ""
    return [
        f"record_batches={kept}: rl replay needs a checkpoint within the last {kept} steps, which only "
        f"save_every_minutes={config.save_every_minutes:g} may bring; to be sure, set "
        + (
            f"record_batches{least}"
            if before
            else f"save_every below steps={last}, and record_batches as large"
        )
    ]


def _checkpoint_before_the_last(config: RunConfig) -> int:
    """The newest step before the last that save_every saves; 0 for none."""
    return (config.steps - 1) // config.save_every * config.save_every if config.save_every else 0
