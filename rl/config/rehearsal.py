"""An environment at work before a run: a policy that says fixed texts, in processes as workers have.

Pickled as for the workers, made ready, driven and rewarded under the run's own limits. No model is needed.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rl.config.run import RunConfig
from rl.envs.base import Env, RolloutContext, derive_seed, held_out
from rl.envs.chat.agent import AgentEnv, door_for
from rl.envs.chat.demonstration import chat_sample, taught_answer
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.host import EpisodeHost
from rl.envs.chat.loop import chat_template
from rl.envs.chat.testing import CannedPolicy
from rl.envs.chat.tool_calls import write_calls
from rl.envs.remake import keys_elsewhere, some_problems
from rl.envs.verifier import Verifier
from rl.errors import ConfigError, RunError, one_line
from rl.fields import shown
from rl.interfaces import Door, Episodes, Tokenizer
from rl.observability.silence import break_silence
from rl.types import Problem, Prompt, Rewards, Rollout, SamplingParams, Score
from rl.waiting import within

_MOST_SECONDS = 60.0
_OF_ANY_ANSWER = ("type", "timeout")
"""Causes that say a mistake of the reward's, whatever the answer. Others may be the answer's own."""


@dataclass
class Rehearsal:
    """What came of it."""

    problems: list[str] = field(default_factory=list)
    """What keeps a run from starting, one line each."""
    notes: list[str] = field(default_factory=list)
    """What happened, for people."""
    takes: "list[Take]" = field(default_factory=list)
    """What was tried."""


@dataclass(frozen=True)
class Take:
    """An answer of the canned policy, and what came of it."""

    texts: Sequence[str]
    rollout: Rollout
    score: Score


def rehearse(config: RunConfig, tokenizer: Tokenizer) -> Rehearsal:
    """Of a config whose environment has passed `check_env`."""
    env, rehearsal = config.env, Rehearsal()
    trying = break_silence(f"trying {type(env).__name__} with a canned policy")
    with trying, _without_output(), ThreadPoolExecutor(1) as beside:
        elsewhere = beside.submit(_made_elsewhere, env)
        try:
            asyncio.run(_rehearse(config, tokenizer, rehearsal))
        except TimeoutError:
            rehearsal.notes.append(f"not all was tried: it takes over {_MOST_SECONDS:g} s")
        except (ConfigError, RunError) as error:
            rehearsal.problems.append(f"env {type(env).__name__}: {error}")
        except Exception as error:  # the user's own code: encode(), drive()
            rehearsal.problems.append(f"env {type(env).__name__} failed with {one_line(error)}; fix it")
        if problems := elsewhere.result():  # which other failures may come from
            return Rehearsal(problems)
    return rehearsal


def _made_elsewhere(env: Env) -> list[str]:
    elsewhere, name = keys_elsewhere(env), type(env).__name__
    if isinstance(elsewhere, str):
        return [f"env {name} does not work in a process of its own: {elsewhere}; fix it"]
    for local, other_key in zip(some_problems(env, anew=False), elsewhere, strict=False):
        if local.key != other_key:
            return [
                f"env {name}.generate() makes another problem in another process (of {local.id!r:.40}); draw "
                f"all from random.Random(seed), and sort what comes from a set"
            ]
    return []


async def _rehearse(config: RunConfig, tokenizer: Tokenizer, rehearsal: Rehearsal) -> None:
    env = config.env
    taught = env.train_problem(config.seed)
    problems = {problem.task: problem for problem in [*held_out(env), taught]}
    door = door_for(env, tokenizer)
    stage = _Stage(config, tokenizer, door)
    try:
        async with within(_MOST_SECONDS):
            for problem in problems.values():
                takes = [await stage.take(problem, texts) for texts in _answers(env, problem, tokenizer)]
                _judge(config, takes, rehearsal)
                rehearsal.takes += takes
                if problem.task == taught.task:
                    rehearsal.problems += _begins_otherwise(config, problem, takes[0], tokenizer)
    finally:
        if door is not None:
            await door.close()
        stage.close()


def _begins_otherwise(config: RunConfig, problem: Problem, take: Take, tokenizer: Tokenizer) -> list[str]:
    """Whether an episode begins with the words that supervised learning puts before what it teaches."""
    env, begins = config.env, take.rollout.segments
    if not isinstance(env, ChatEnv) or isinstance(env, AgentEnv) or not begins:
        return []
    if not config.warmup.steps and config.data == "rollouts":
        return []
    if config.data == "preferences":
        sample, remedy = taught_answer(env, problem, "", tokenizer, "chosen"), ""
    else:
        sample = chat_sample(env, problem, derive_seed("rehearsal"), tokenizer)
        remedy = ", or begin chat_demonstration() with it"
    before = sample.tokens[: int(sample.loss_mask.argmax())].tolist()
    if before == list(begins[0].tokens):
        return []
    return [
        f"env {type(env).__name__}: its episodes begin with more than what it teaches stands behind, the "
        f"opening; say what start() says in opening(){remedy}"
    ]


class _Stage:
    """The environment's processes, and a canned policy."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, door: Door | None):
        """Raises RunError where the environment does not get ready."""
        env, seconds = config.env, config.reward.limit_seconds
        self._config, self._tokenizer, self._door = config, tokenizer, door
        self._host = EpisodeHost(env, seconds) if isinstance(env, ChatEnv) else None
        self._verifier = None if isinstance(env, ChatEnv) else Verifier(env, seconds)

    def close(self) -> None:
        for part in (self._host, self._verifier):
            if part is not None:
                part.close()

    async def take(self, problem: Problem, texts: Sequence[str]) -> Take:
        """The policy says the texts, one a turn, the last again and again."""
        config, tokenizer = self._config, self._tokenizer
        rollout = await canned_rollout(
            config.env, problem, texts, tokenizer, config.max_seq_len, self._host, self._door
        )
        score = rollout.score
        if score is None:
            assert self._verifier is not None  # only a ChatEnv's episodes score themselves
            (score,) = await asyncio.to_thread(self._verifier.score, [rollout])
        return Take(texts, rollout, score)


async def canned_rollout(
    env: Env,
    problem: Problem,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    max_seq_len: int,
    episodes: Episodes | None,
    door: Door | None,
) -> Rollout:
    """The policy says the texts, one a turn, the last again and again. Of a ChatEnv it has its score."""
    if isinstance(env, ChatEnv):
        end = chat_template(tokenizer, env.call_format).end_id
    else:
        end = env.end_id(problem, tokenizer)
    prompt = env.encode(problem, tokenizer)
    if not isinstance(prompt, Prompt):
        raise ConfigError(f"encode() returned {shown(prompt)}; return a Prompt")
    policy = CannedPolicy(tokenizer, texts, end)
    params = SamplingParams(env.max_new_tokens, seed=derive_seed("rehearsal"))
    context = RolloutContext(policy, tokenizer, params, max_seq_len, episodes, door)
    num_rollouts = 2 if isinstance(env, ChatEnv) and env.rewards_groups else 1
    rollout, *_ = await env.drive(prompt, num_rollouts, context)
    return rollout


def _answers(env: Env, problem: Problem, tokenizer: Tokenizer) -> list[list[str]]:
    """What the policy says, in each rollout: the right answer, a wrong one, calls of tools."""
    word = _word(problem, tokenizer)
    answers = [[problem.answer or "yes"], [word]]
    if isinstance(env, ChatEnv) and (tools := env.tools()):
        written = chat_template(tokenizer, env.call_format).written
        functions = (
            {"name": tool.name, "arguments": _arguments(tool.schema["function"], word)} for tool in tools
        )
        calls = [write_calls([function], written) for function in functions]
        size = env.max_turns - 1  # the last turn is the answer
        parts = [calls[i : i + size] for i in range(0, len(calls), size)] if size else [[]]
        answers += [[*part, problem.answer or "yes"] for part in parts]
    return answers


def _word(problem: Problem, tokenizer: Tokenizer) -> str:
    """A wrong answer that the model can write: a model of a few characters lacks most words."""
    for word in dict.fromkeys(["x", *problem.question]):
        if word.strip() and word != problem.answer and tokenizer.decode(tokenizer.encode_plain(word)) == word:
            return word
    return "x"


def _arguments(function: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Some that suit a tool's schema. word: a string."""
    parameters = function.get("parameters") or {}
    shapes = parameters.get("properties", {})
    return {name: _value(shapes[name], word) for name in parameters.get("required", ()) if name in shapes}


def _value(shape: Any, word: str) -> Any:
    """shape: JSON Schema, in whatever form a server writes it; `True` is a schema too."""
    if not isinstance(shape, Mapping):
        return word
    if "const" in shape:
        return shape["const"]
    if shape.get("enum"):
        return shape["enum"][0]
    if ways := shape.get("anyOf") or shape.get("oneOf"):
        return _value(ways[0], word)
    kinds = shape.get("type")
    kind = kinds if isinstance(kinds, str) else next(iter(kinds or ()), None)
    by_type = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    return by_type.get(str(kind), word)


def _judge(config: RunConfig, takes: Sequence[Take], rehearsal: Rehearsal) -> None:
    """Add to the rehearsal what the takes of one problem show."""
    name = type(config.env).__name__
    asked = takes[0].rollout.problem
    rehearsal.notes.append(f"asked {shown(asked.question or asked.messages)}")
    for take in takes:
        answers = " then ".join(shown(text) for text in take.texts)
        rehearsal.notes.append(f"  to {answers}: {_outcome(config, take.score)}")
        for message in take.rollout.messages:
            if message["role"] == "tool" and str(message["content"]).startswith("Error: "):
                rehearsal.notes.append(f"  the tool {message['name']} says {shown(message['content'])}")
    if any(_lacks_its_judge(config, take.score) for take in takes):
        return
    if any(take.score.parts != Rewards() for take in takes) and not config.algorithm.reads_turns:
        rehearsal.problems.append(
            f"env {name} rewards each turn, or token, which advantages {type(config.advantages).__name__} "
            f"does not read: all would have the same advantage; use GAE() or ReinforcePP(), or return one "
            f"reward"
        )
    failed = [take for take in takes if take.score.error]
    sure = [take for take in failed if take.score.cause in _OF_ANY_ANSWER]
    if sure or len(failed) == len(takes):
        worst = (sure or failed)[0]
        rehearsal.problems.append(
            f"env {name} fails where the policy says {shown(worst.texts[-1])}: {worst.score.error:.300}; "
            f"fix it"
        )


def _lacks_its_judge(config: RunConfig, score: Score) -> bool:
    return config.judge.model is not None and score.cause == "judge"


def _outcome(config: RunConfig, score: Score) -> str:
    if _lacks_its_judge(config, score):
        return "its judge starts with the run, so the reward was not tried to its end"
    if score.error:
        return f"fails: {score.error:.160}"
    text = f"reward {score.reward:g}"
    if any(score.turn_components):
        turns = [_named(parts) for parts in score.turn_components]
        return f"{text} ({'; '.join(f'turn {i}: {turn}' for i, turn in enumerate(turns, 1))})"
    if score.parts.turns:
        return f"{text} (of turns: {', '.join(f'{reward:g}' for reward in score.parts.turns)})"
    return f"{text} ({_named(score.components)})" if score.components else text


def _named(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {reward:g}" for name, reward in parts.items())


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Nothing that the environment's processes write is shown: their logs in a run."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as kept:
        for number in (1, 2):
            try:
                copy = os.dup(number)
            except OSError:  # closed by whoever started us
                continue
            kept.callback(os.close, copy)
            kept.callback(os.dup2, copy, number)
            os.dup2(log.fileno(), number)
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            yield
