"""What is wrong with a run's environment: it is asked, before anything starts, for what the run will ask."""

import dataclasses
import inspect
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl.config.env_methods import wrong_methods
from rl.config.recipe_modules import names_left_behind
from rl.config.run import RunConfig
from rl.envs.base import Env, held_out
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.loop import chat_template
from rl.envs.chat.template import for_template
from rl.envs.mixture import Mixture
from rl.envs.problems import checked
from rl.envs.remake import has_own_held_out, some_problems
from rl.errors import ConfigError, one_line
from rl.fields import kind, short, shown
from rl.interfaces import Tokenizer
from rl.models.sources import ModelSource, TinyQwen3
from rl.types import Problem

_PACKAGE = Path(__file__).parents[1]
_MOST_PROMPTS = 256


def check_env(config: RunConfig) -> list[str]:
    """One line for each problem."""
    try:
        within = [env for env in config.env.made_of if env is not config.env]
        problems = [line for env in (config.env, *within) for line in _not_an_env(env)]
        return problems or _own_checks(config.env) or _at_work(config)
    except ConfigError as error:
        return [str(error)]
    except (Exception, SystemExit) as error:  # the user's own code: say so, rather than show our stack
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = Path(last.filename).is_relative_to(_PACKAGE)  # where we call what is theirs
        where = "" if ours else f"{last.filename} line {last.lineno}: "
        cause = one_line(error)
        name = type(config.env).__name__
        return [f"env {name} failed to make a problem ({where}{cause}); fix it, or its settings"]


def _own_checks(env: Env) -> list[str]:
    problems = env.validate()
    if not isinstance(problems, list) or not all(isinstance(line, str) for line in problems):
        raise ConfigError(
            f"{type(env).__name__}.validate() returned {shown(problems)}; return a list of strings, empty "
            f"where nothing is wrong"
        )
    return problems


def _not_an_env(env: Env) -> list[str]:
    """What keeps it from being one: methods that are missing, fields that do not suit."""
    made_of, name, problems = type(env), type(env).__name__, []
    if made_of.generate is Env.generate and made_of.train_problem is Env.train_problem:
        problems.append(f"env {name} has no generate(self, seed), which makes a problem; add it")
    scores_episodes = isinstance(env, ChatEnv) and (
        type(env).reward_episode is not ChatEnv.reward_episode or env.rewards_groups
    )
    if made_of.reward is Env.reward and not scores_episodes:
        chats = "reward_episode(self, episode), or " if isinstance(env, ChatEnv) else ""
        problems.append(
            f"env {name} has no {chats}reward(self, problem, response, stop), which verifies; add it"
        )
    if "__dataclass_fields__" not in vars(made_of) and vars(made_of).get("__annotations__"):
        problems.append(
            f"env {name} is no dataclass, so that its own fields are ignored; add @dataclass(frozen=True)"
        )
    own_fields = {field.name for field in dataclasses.fields(env)}
    parameters = inspect.signature(made_of).parameters.keys()
    if init_vars := sorted((made_of.__dataclass_fields__.keys() - own_fields) & parameters):
        problems.append(
            f"env {name} has {init_vars[0]} as an InitVar, which config.json would lose; make it a field"
        )
    try:
        hash(env)
    except Exception as error:  # whatever a field of the user's raises
        fields = [f.name for f in dataclasses.fields(env) if not _hashable(getattr(env, f.name))]
        where = (
            f"its field {fields[0]} is a {type(getattr(env, fields[0])).__name__}" if fields else str(error)
        )
        problems.append(f"env {name} cannot be hashed: {where}; use frozen=True, and tuples")
    try:
        left_behind = names_left_behind(env)
    except Exception as error:  # whatever a field of the user's raises
        problems.append(
            f"env {name} cannot be sent to other processes ({error}); open files and connections in prepare()"
        )
    else:
        problems += [
            f"env {name} uses {item}, which other processes cannot import; move it into a module beside the "
            f"recipe's file, and import it from there"
            for item in dict.fromkeys(left_behind)
        ]
    return problems + wrong_methods(env)


def _chat_text(env: ChatEnv, problem: Problem, seed: int) -> str:
    """What its demonstration says. Raises ConfigError where that is no conversation."""
    turns = env.chat_demonstration(problem, seed)
    if (
        isinstance(turns, str)
        or not isinstance(turns, Sequence)
        or not all(isinstance(m, Mapping) and "role" in m for m in turns)
        or not any(m["role"] == "assistant" for m in turns)
    ):
        raise ConfigError(
            f"{type(env).__name__}.chat_demonstration() returned {shown(turns)}; return messages; the "
            f"assistant's are taught"
        )
    return "".join(str(m.get("content") or "") for m in turns)


def check_chat_env(env: ChatEnv, tokenizer: Tokenizer) -> list[str]:
    """What is wrong with it for the model's chat template, one line each."""
    problems = []
    if not env.chat:
        problems.append(
            "env.chat=False has no effect on a ChatEnv, which talks in the chat template; remove it"
        )
    if env.stop:
        problems.append("env.stop has no effect on a ChatEnv, whose turns end as the chat template ends them")
    for name, why in env.unread().items():
        if getattr(env, name) != getattr(type(env), name):
            problems.append(f"env.{name} has no effect {why}")
    try:
        template = chat_template(tokenizer, env.call_format)
        tools = [tool.schema for tool in env.tools()]
        asked = {"role": "user", "content": "x"}
        template.prompt(env.opening(env.train_problem(0)) or [asked], tools)
        template.continuation([asked], tools)
    except ConfigError as error:
        problems.append(str(error))
    return problems


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return True


def _changing(env: Env) -> list[str]:
    """Why its held-out problems would not stay the same."""
    problems, again = some_problems(env, anew=False), some_problems(env, anew=True)
    for first, second in zip(problems, again, strict=True):
        if first.key != second.key:
            made_by = "eval_problems() or generate()" if has_own_held_out(env) else "generate()"
            return [
                f"env {type(env).__name__}.{made_by} makes another problem each time from one seed (of "
                f"{first.id!r:.40}), so that none could be held out; draw all from random.Random(seed)"
            ]
    return []


def _at_work(config: RunConfig) -> list[str]:
    """Ask it for problems, and for what is learned from them."""
    env = config.env
    problems = [checked(env.train_problem(config.seed)), *held_out(env)]
    if changing := _changing(env):
        return changing
    if config.warmup.steps > 0 or config.data == "demonstrations":
        text = _chat_text(env, problems[0], config.seed) if isinstance(env, ChatEnv) else None
        text = env.demonstration(problems[0], config.seed) if text is None else text
        if not isinstance(text, str):
            raise ConfigError(f"{type(env).__name__}.demonstration() returned {kind(text)}; return a string")
    if config.data == "preferences":
        pair = env.preference(problems[0], config.seed)
        if (
            isinstance(pair, str)
            or not isinstance(pair, Sequence)
            or len(pair) != 2
            or not all(isinstance(t, str) for t in pair)
        ):
            raise ConfigError(
                f"{type(env).__name__}.preference() returned {shown(pair)}; return two strings, the better "
                f"first"
            )
    if any(problem.messages for problem in problems) and not (env.chat or isinstance(env, Mixture)):
        return [f"env {type(env).__name__}'s problems have messages, which need env.chat=True; set it"]
    contents = (for_template(message)["content"] for problem in problems for message in problem.messages)
    asked = (problem.question + problem.answer for problem in problems)
    prefixes = (part.prompt_prefix for part in env.made_of)
    return without_token(config.model, "".join([*prefixes, *asked, *contents]))


def without_token(model: ModelSource, text: str) -> list[str]:
    """A line, where the model's tokenizer lacks characters of the text."""
    if not (unknown := model.unknown_characters(text)):
        return []
    if isinstance(model, TinyQwen3):
        return [f"the task uses characters that model.alphabet lacks: {unknown!r}; add them"]
    return [
        f"the task uses characters that the model's tokenizer lacks: {short(repr(unknown))}; use another "
        f"model, or one that was made for this task"
    ]


def check_prompts(env: Env, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Which held-out problem leaves no room for an answer. limit: tokens of the longest sequence.

    Of many, the longest texts are looked at. A ChatEnv's prompts are made as its episodes begin.
    """
    problems = sorted(held_out(env), key=lambda p: len(p.question) + len(str(p.messages)), reverse=True)
    try:
        prompts = [env.encode(problem, tokenizer) for problem in problems[:_MOST_PROMPTS]]
        longest = max(prompts, key=lambda prompt: len(prompt.tokens))
        if len(longest.tokens) < limit:
            return []
    except Exception:  # the user's own code: the rehearsal says what is wrong with it
        return []
    return [
        f"the problem {shown(longest.problem.id)} has a prompt of {len(longest.tokens)} tokens, which leaves "
        f"no room for an answer in {limit} tokens (the model's positions, max_seq_len); shorten it, "
        f"or use another model"
    ]
