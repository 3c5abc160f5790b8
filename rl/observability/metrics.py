"""From groups, batches and what the trainer returned to the numbers of a step. Pure functions."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from rl.types import Group, StopReason

_OF_PAIRS = ("dpo/pairs", "dpo/accuracy", "dpo/margin")
_TOKENS = {"trained": "tokens", "computed": "computed", "computed_unshared": "unshared", "cuts": "cuts"}


def learning_metrics(updates: Sequence[Mapping[str, float]], sampled: bool) -> dict[str, float]:
    """The metrics of a step's updates.

    updates: for each optimizer step what `forward_backward` and `optim_step` returned, and its `denominator`.

    Sums become means over the tokens that were trained on, `loss` and `grad_norm` means over the updates.
    Where the generator `sampled` the tokens, `logprob_diff/*` and `ratio_outside` compare it with the
    trainer, on the first update's tokens: after that they are not the same policy.
    """
    first = updates[0]
    metrics = _means(updates, skip=("logprob_diff", "ratio_outside", *_OF_PAIRS))
    metrics["updates"] = len(updates)
    for name, key in _TOKENS.items():
        metrics[f"tokens/{name}"] = sum(u[f"{key}:sum"] for u in updates)
    tokens = first["tokens:sum"] or math.nan
    if sampled:
        metrics |= {
            "logprob_diff/mean": first["logprob_diff:sum"] / tokens,
            "logprob_diff/max": first["logprob_diff:max"],
            "logprob_diff/ratio_outside": first["ratio_outside:sum"] / tokens,
        }
    if "dpo/pairs:sum" in first:
        pairs, *of_pairs = (sum(u[f"{name}:sum"] for u in updates) for name in _OF_PAIRS)
        metrics |= dict(zip(_OF_PAIRS[1:], (total / pairs for total in of_pairs), strict=True))
    return metrics


def critic_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`critic/explained`: share of the returns' variance that the values before the first update explain."""
    first = updates[0]
    n = first["tokens:sum"] or math.nan
    of_error, of_return, of_square = (
        first.get(f"{x}:sum", 0.0) for x in ("error", "return", "return_squared")
    )
    variance = of_square / n - (of_return / n) ** 2
    means = _means(updates, skip=("error", "return", "return_squared"))
    explained = 1 - of_error / n / variance if variance > 0 else math.nan
    return {f"critic/{name}": value for name, value in means.items()} | {"critic/explained": explained}


def _means(updates: Sequence[Mapping[str, float]], skip: Sequence[str]) -> dict[str, float]:
    tokens = sum(u["tokens:sum"] for u in updates) or math.nan
    names = [
        n.removesuffix(":sum") for n in dict.fromkeys(n for u in updates for n in u) if n.endswith(":sum")
    ]
    means = {
        n: sum(u.get(f"{n}:sum", 0.0) for u in updates) / tokens
        for n in names
        if n not in ("loss", *_TOKENS.values(), *skip)
    }
    for name in dict.fromkeys(
        n for u in updates for n in u if n.endswith(":max") and n.removesuffix(":max") not in skip
    ):
        means[name.replace(":", "/")] = max(u[name] for u in updates if name in u)
    means["loss"] = statistics.fmean(u["loss:sum"] / u["denominator"] for u in updates)
    means["grad_norm"] = statistics.fmean(u["grad_norm"] for u in updates)
    return means


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of what was sampled; nothing where nothing was. What failed before its first token has no length."""
    if not groups:
        return {}
    scores = [score for group in groups for score in group.scores]
    kept = [score for score in scores if not score.is_dropped]
    rewards = [score.reward for score in kept]
    begun = [
        rollout
        for group in groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
        if rollout.versions is not None or not score.is_dropped
    ]
    lengths = [sum(rollout.turn_lengths) for rollout in begun]
    compared = [group for group in groups if sum(not score.is_dropped for score in group.scores) > 1]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": statistics.pstdev(rewards) if rewards else math.nan,
        "reward/correct": _mean([score.correct for score in kept]),
        "reward/errors": sum(score.error is not None for score in scores),
        **_by_name("reward/errors", [{s.cause: 1} for s in scores if s.cause], sum),
        **_by_name("reward/part", [s.components for s in kept], statistics.fmean),
        **_by_name("episode", [rollout.counts for rollout in begun], statistics.fmean),
        "group/with_signal": _mean([group.has_signal for group in compared]),
        "tokens/sampled": sum(lengths),
        "rollout/length": _mean(lengths),
        "rollout/truncated": _mean([rollout.stop == StopReason.LENGTH for rollout in begun]),
    }


def _mean(values: Sequence[float]) -> float:
    """NaN where there are none."""
    return statistics.fmean(values) if values else math.nan


def _by_name(
    prefix: str, each: Sequence[Mapping[str, float]], total: Callable[[list[float]], float]
) -> dict[str, float]:
    """prefix/name -> the total of what each has under the name; 0 where one has nothing."""
    names = dict.fromkeys(name for values in each for name in values)
    return {f"{prefix}/{name}": total([values.get(name, 0.0) for values in each]) for name in names}


def offpolicy_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions behind the policy its groups were sampled, by the oldest token of each."""
    ages = [version - group.oldest_version for group in groups if group.was_sampled] or [0]
    return {"offpolicy/mean": statistics.fmean(ages), "offpolicy/max": max(ages)}


def eval_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`eval/accuracy`: share of held-out problems that were answered right; failed ones count as wrong.

    `eval/accuracy/TASK`: of a task's, where problems have one; of the task `a/b/c` also of `a` and `a/b`.
    """
    scores = [score for group in groups for score in group.scores]
    accuracy = statistics.fmean(score.correct for score in scores)
    of_tasks: dict[str, list[bool]] = {}
    for group in groups:
        task = group.rollouts[0].problem.task
        for name in accumulate(task.split("/"), "{}/{}".format) if task else ():
            of_tasks.setdefault(name, []).extend(score.correct for score in group.scores)
    return {f"eval/accuracy/{task}": statistics.fmean(right) for task, right in of_tasks.items()} | {
        "eval/accuracy": accuracy,
        "eval/standard_error": math.sqrt(accuracy * (1 - accuracy) / len(scores)),
        "eval/reward": statistics.fmean(score.reward for score in scores),
        "eval/errors": sum(score.error is not None for score in scores),
    }
