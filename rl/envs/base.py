"""Env: a task. It makes problems and prompts, walks the policy through them and verifies its responses."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

from rl.bounds import PositiveInt, Problems
from rl.envs.chat.template import for_template, turn_end
from rl.envs.problems import checked
from rl.errors import ConfigError
from rl.fields import shown
from rl.interfaces import Door, Episodes, Sampler, Tokenizer
from rl.sequences import lay_out
from rl.types import (
    Completion,
    Problem,
    Prompt,
    Rewards,
    Rollout,
    SamplingParams,
    Score,
    Segment,
    StopReason,
    Verdict,
)
from rl.waiting import in_thread

_LONG = 4096
"""Tokens of a group that are decoded in a thread: they take over a millisecond."""
_MOST_ENVS = 128
"""Whose held-out problems are kept: more than the tasks of a Mixture."""


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but `parts`: the same in every process and on every replay."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class RolloutContext:
    """What rollouts of a group are made with."""

    sampler: Sampler
    tokenizer: Tokenizer
    params: SamplingParams
    max_tokens: int
    """Longest sequence: prompt and all that is sampled."""
    episodes: Episodes | None = None  # where a ChatEnv's code runs
    door: Door | None = None  # where an AgentEnv's agents find the policy


@dataclass(frozen=True)
class Env:
    """Derive from this class and implement `generate` and `reward`.

    The rest is one turn for each problem, and keeps held-out problems out of training. An Env is picklable
    and without state. Its methods run in the controller, `reward` in a process of its own.
    """

    max_new_tokens: PositiveInt = 64
    """Longest completion, in tokens; one that is cut off has no EOS."""

    num_eval: Problems = 256
    """Held-out problems, which training never draws."""

    chat: bool = False
    """Put the question through the tokenizer's chat template, as a user's turn."""

    prompt_prefix: str = ""
    """Text before every question: instructions, or worked examples. With chat, the system's turn."""

    stop: tuple[str, ...] = ()
    """Texts that end a completion, as EOS does, and are no part of the response, as EOS is not. Each has to
    be one token of the tokenizer."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises ConfigError where the class sets an inherited field without an annotation.

        Python takes `num_eval = 2` for an attribute of the class. Instances would keep the inherited default.
        """
        super().__init_subclass__(**arguments)
        inherited = {field.name for base in cls.__bases__ if is_dataclass(base) for field in fields(base)}
        annotated = vars(cls).get("__annotations__", {})
        for name, value in vars(cls).items():
            if isinstance(value, MemberDescriptorType):  # a field of slots=True
                continue
            if name in inherited and name not in annotated:
                annotation = type(value).__name__
                raise ConfigError(
                    f"env {cls.__name__} sets {name} without a type, so it is no field and has no effect; "
                    f"write {name}: {annotation} = {shown(value)}"
                )

    @property
    def made_of(self) -> tuple["Env", ...]:
        """The tasks that it is made of."""
        return (self,)

    @property
    def trains(self) -> tuple["Env", ...]:
        """Of `made_of`, the tasks that training draws problems of."""
        return self.made_of

    def generate(self, seed: int) -> Problem:
        """A problem that depends only on `seed`."""
        raise NotImplementedError

    def reward(
        self, problem: Problem, response: str, stop: StopReason
    ) -> float | Rewards | Mapping[str, float] | Verdict:
        """Verify a response. Time-limited; may raise.

        1 is success: accuracy counts the rewards of at least 1. Verdict says of any reward whether it is
        success. Rewards spreads it over the response:
        `turns`, one for each run of sampled tokens, or `tokens`, one for each. Named parts are summed.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Import what `reward` needs. Called once in each process that scores, as it starts."""

    def demonstration(self, problem: Problem, seed: int) -> str:
        """The text that supervised learning teaches for this problem."""
        raise ConfigError(
            f"{type(self).__name__} has no demonstrations, from which warmup.steps and data=demonstrations "
            f"learn; implement demonstration()"
        )

    def preference(self, problem: Problem, seed: int) -> tuple[str, str]:
        """Two responses: the better one, then the worse."""
        raise ConfigError(f"{type(self).__name__} has no preferences; implement preference()")

    def end_id(self, problem: Problem, tokenizer: Tokenizer) -> int:
        """The token that ends an answer: in a chat what ends turns in the model's template, else EOS."""
        with suppress(ConfigError):  # a template whose turns do not end with a token
            if self.chat and tokenizer.chat_template:
                return turn_end(tokenizer)[0]
        return tokenizer.eos_id

    def stop_ids(self, problem: Problem, tokenizer: Tokenizer) -> tuple[int, ...]:
        """What ends an answer beside EOS: `end_id`, and the token of each of `stop`."""
        texts = (tokenizer.encode_plain(text)[0] for text in self.stop)
        return (self.end_id(problem, tokenizer), *texts)

    def most_sampled(self, longest: int) -> int:
        """Tokens that a rollout may sample in all. longest: a sequence's, prompt included."""
        return min(self.max_new_tokens, longest)

    def validate(self) -> list[str]:
        """What is wrong with this configuration, one line each."""
        return []

    def validate_held_out(self) -> list[str]:
        """The same, where all of its problems are held out and none is trained on."""
        return self.validate()

    def eval_problems(self) -> Sequence[Problem]:
        """The held-out problems: the first `num_eval` that differ, of a fixed sequence of seeds.

        May be slow. A run calls it once, through `held_out`, and once more to see that it makes the same.
        """
        return _first_of_their_kind(self)

    def may_train_on(self, problem: Problem) -> bool:
        """Whether training could draw it, were it not held out."""
        return True

    def train_problem(self, seed: int) -> Problem:
        """A problem that is not held out."""
        excluded = _held_out_keys(self)
        for attempt in range(1000):
            problem = checked(self.generate(derive_seed("train", seed, attempt)))
            if problem.key not in excluded:
                return problem
        raise ConfigError(
            f"{type(self).__name__} has too few problems beside its {self.num_eval} held-out ones: "
            f"generate() has to make more that differ in question, answer or metadata; or lower env.num_eval"
        )

    def encode(self, problem: Problem, tokenizer: Tokenizer) -> Prompt:
        """Raises ConfigError where the problem has messages and the environment no chat template."""
        if problem.messages and not self.chat:
            raise ConfigError(f"the problem {problem.id!r} has messages, which need env.chat=True; set it")
        if problem.messages:
            system = [{"role": "system", "content": self.prompt_prefix}] if self.prompt_prefix else []
            text = tokenizer.render([*system, *map(for_template, problem.messages)], (), True)
            return Prompt(problem, tuple(tokenizer.encode_plain(text)))
        if self.chat:
            return Prompt(problem, tuple(tokenizer.encode_chat(problem.question, self.prompt_prefix)))
        return Prompt(problem, tuple(tokenizer.encode(self.prompt_prefix + problem.question)))

    async def drive(self, prompt: Prompt, n: int, context: RolloutContext) -> Sequence[Rollout]:
        """Walk the policy through the problem n times. For tools or several turns, see ChatEnv."""
        prompt_segment = Segment.unsampled(prompt.tokens)
        if len(prompt.tokens) >= context.max_tokens:
            score = Score(0.0, no_room("prompt", len(prompt.tokens), context.max_tokens), cause="too_long")
            segments = lay_out([prompt_segment])
            return [Rollout(prompt.problem, segments, "", StopReason.STOP, None, score=score)] * n
        stop_ids = self.stop_ids(prompt.problem, context.tokenizer)

        def response(completion: Completion) -> str:
            """Without the text of `stop` that ended it, as without EOS."""
            tokens = completion.tokens.tolist()
            ends = completion.stop is StopReason.STOP and tokens[-1:] and tokens[-1] in stop_ids
            return context.tokenizer.decode(tokens[:-1] if ends else tokens)

        completions = await context.sampler.sample(prompt.tokens, n, context.params)

        def rollouts() -> list[Rollout]:
            return [
                Rollout(
                    problem=prompt.problem,
                    segments=lay_out([prompt_segment, Segment(completion.tokens, True, completion.logprobs)]),
                    response=response(completion),
                    stop=completion.stop,
                    versions=completion.versions,
                )
                for completion in completions
            ]

        if sum(len(completion.tokens) for completion in completions) < _LONG:
            return rollouts()
        return await in_thread(rollouts)


def no_room(what: str, num_tokens: int, limit: int) -> str:
    """Why an answer cannot begin. limit: tokens of the longest sequence."""
    return (
        f"the {what} of {num_tokens} tokens leaves no room for an answer within {limit} (max_seq_len, or the "
        f"model's positions)"
    )


@lru_cache(maxsize=_MOST_ENVS)
def held_out(env: Env) -> tuple[Problem, ...]:
    """The problems that `env.eval_problems()` makes, which this process asks for once.

    Raises ConfigError where it makes none.
    """
    problems = env.eval_problems()
    if not isinstance(problems, Sequence) or not problems:
        raise ConfigError(
            f"{type(env).__name__}.eval_problems() returned {shown(problems)}; return a list of Problems"
        )
    return tuple(checked(problem) for problem in problems)


@lru_cache(maxsize=_MOST_ENVS)
def _held_out_keys(env: Env) -> frozenset[str]:
    return frozenset(problem.key for problem in held_out(env))


def _first_of_their_kind(env: Env) -> Sequence[Problem]:
    problems: dict[str, Problem] = {}
    for i in range(env.num_eval * 10):
        if len(problems) == env.num_eval:
            break
        problem = checked(env.generate(derive_seed("eval", i)))
        problems.setdefault(problem.key, problem)
    if len(problems) < env.num_eval:
        raise ConfigError(
            f"{type(env).__name__} has only {len(problems)} distinct problems; lower "
            f"env.num_eval={env.num_eval}, or have generate() make more, by question, answer or metadata"
        )
    return tuple(problems.values())
