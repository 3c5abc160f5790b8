"""What is wrong with a run's judge, or with an environment that would find none."""

import dataclasses
from collections.abc import Iterator

from rl.config.run import JudgeConfig, RunConfig
from rl.envs.judge import Judge
from rl.fields import parts_of
from rl.plan.demand import ModelFacts
from rl.plan.shapes import why_not_sampled_by


def check_judge(config: RunConfig) -> list[str]:
    """One line for each problem."""
    return _own_judge(config) + _too_slow(config)


def _too_slow(config: RunConfig) -> list[str]:
    """A reward that is stopped while its judge answers is scored 0, as if the policy had brought it about."""
    limit = config.reward.limit_seconds
    return [
        f"reward.limit_seconds={limit:g} is not over {name}.seconds={judge.seconds:g}, so that answers "
        f"which a slow judge is grading are scored 0; set --reward.limit_seconds {2 * judge.seconds:g}"
        for name, judge in _judges(config)
        if limit <= judge.seconds
    ]


def _own_judge(config: RunConfig) -> list[str]:
    judge = config.judge
    if judge.model is None:
        names = [field.name for field in dataclasses.fields(JudgeConfig)]
        changed = [name for name in names if getattr(judge, name) != getattr(JudgeConfig(), name)]
        return [
            *(f"judge.{name} has no effect without judge.model; set it" for name in changed),
            *(
                f"{name}.base_url is empty and the run has no judge; set it, or judge.model"
                for name, each in _judges(config)
                if not each.base_url
            ),
        ]
    judges = list(_judges(config))
    if judges and all(each.base_url for _, each in judges):
        return [f"{judges[0][0]}.base_url is set, so nobody asks judge.model; leave one of them out"]
    if judge.model.random_weights:
        return ["judge.model has random weights, which judge nothing; use a ModelDir"]
    if problems := judge.model.validate():
        return [f"judge.model: {problem}" for problem in problems]
    if why := judge.model.why_no_chat():
        return [f"judge.model's tokenizer {why}; use a model that chats"]
    why = why_not_sampled_by(judge.tensor_parallel, ModelFacts.of(judge.model.config(), 1).heads)
    return [f"judge.tensor_parallel={judge.tensor_parallel} {why}"] if why else []


def _judges(config: RunConfig) -> Iterator[tuple[str, Judge]]:
    """Of the environment's settings, also of tuples of them."""
    for env in config.env.made_of:
        for field in dataclasses.fields(env):
            judges = [part for part in parts_of(getattr(env, field.name)) if isinstance(part, Judge)]
            yield from ((f"env.{field.name}", judge) for judge in judges)
