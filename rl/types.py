"""The nouns. Frozen, built once, free of torch and Monarch, and cheap to send between processes.

Axes: T tokens of one sequence, M target tokens of one micro-batch.
A token at index t is a *target* when the policy sampled it (or is taught it). Its logprob is
log p(token t | tokens < t).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from rl.bounds import NonNegativeFloat, NonNegativeInt
from rl.causes import is_policys
from rl.rewards import all_equal, is_success
from rl.sequences import Sample as Sample
from rl.sequences import Segment as Segment
from rl.sequences import are_equal, become_arrays

PolicyVersion = int
"""0 for the weights before the first RL step, then one more for each optimizer step that was published."""

EngineName = Literal["titan", "hf"]
TransportName = Literal["shared_memory", "torchstore"]
DataKind = Literal["rollouts", "demonstrations", "preferences"]
"""What is learned from: the policy's own samples, or an environment's answers, or pairs of them."""
UpdateMode = Literal["in_flight", "drain"]
"""Of a generator that gets new weights: its requests go on with them, or end with the old ones first."""


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The policy versions that sampled a completion's first and last token."""

    oldest: PolicyVersion
    newest: PolicyVersion


class StopReason(StrEnum):
    STOP = "stop"  # the model ended the completion (EOS or a stop token)
    LENGTH = "length"  # a budget was used up: max_new_tokens, or an episode's


Message = Mapping[str, Any]
"""A message of a chat as OpenAI's API writes it: role, content, and a call's `tool_calls`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One task instance: what is asked, and what its verifier compares with."""

    id: str
    question: str = ""
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # whatever else the task needs to know of it
    messages: tuple[Message, ...] = ()  # with chat: the conversation so far, in place of the question
    task: str = ""  # whose accuracy it counts for too, where a run has several

    @property
    def asked(self) -> str:
        """What it asks, in whichever form: a question is a user's message."""
        messages = list(self.messages) or [{"role": "user", "content": self.question}]
        return json.dumps(messages, sort_keys=True, default=repr)

    @property
    def key(self) -> str:
        """What tells it from other problems: all but its id."""
        parts = [self.question, self.answer, self.metadata, self.messages, self.task]
        return json.dumps(parts, sort_keys=True, default=repr)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem, tokenised once."""

    problem: Problem
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample; `temperature` 0 is greedy. `seed` makes sample i of a request reproducible (seed + i).

    `adapter`: the LoRA adapter to sample with, by the name it was published under, or by the path of a
    directory in PEFT's format, which must not change; None is the model itself.
    """

    max_new_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    adapter: str | None = None
    top_k: int = -1  # -1 for all tokens
    top_p: float = 1.0
    stop_texts: tuple[str, ...] = ()  # for a generator that has the tokenizer
    json_schema: str = ""  # which the text is held to, as JSON; for such a generator too; empty: any text
    ignore_eos: bool = False  # of the model's generation_config.json: stop at stop_token_ids alone
    num_likeliest: int = 0  # of each sampled token's position: the likeliest tokens to return
    prompt_likeliest: int | None = None  # of each prompt token's; None: not even the prompt's own logprobs
    cache_group: str = ""  # requests of one group alone share what the prefix cache holds


Likeliest = tuple[tuple[int, float], ...]
"""Tokens with their logprobs in nats at temperature 1, the likeliest first."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What a generator returns for one sample. It may be made of lists, which become arrays."""

    tokens: np.ndarray  # [T] int32, sampled tokens only, the stop token included
    logprobs: np.ndarray  # [T] float32, nats, at temperature 1, under the policy that sampled them
    versions: VersionRange
    stop: StopReason
    token_versions: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int32)
    )  # [T] int32, which version sampled each token; empty where all are the same
    num_cached_tokens: int = 0  # of the prompt: found in the cache, not computed
    likeliest: tuple[Likeliest, ...] = ()  # [T], where asked for
    prompt_logprobs: tuple[float | None, ...] = ()  # of each prompt token, the first None; where asked for
    prompt_likeliest: tuple[Likeliest, ...] = ()  # of each prompt token's position, the first empty

    def __post_init__(self) -> None:
        become_arrays(self, tokens=np.int32, logprobs=np.float32, token_versions=np.int32)

    def __eq__(self, other: object) -> bool:
        return are_equal(self, other)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One walk through an environment: append-only segments, so that no text is ever tokenised twice."""

    problem: Problem
    segments: tuple[Segment, ...]
    response: str  # the policy's text, of its last turn, decoded, without special tokens
    stop: StopReason
    versions: VersionRange | None  # None where nothing was sampled
    forks: tuple[tuple[Segment, ...], ...] = ()  # more branches; what an earlier one sampled is given
    messages: tuple[Message, ...] = ()  # of a chat: all of it, for people
    score: "Score | None" = None  # where the episode has scored itself; else Env.reward does
    counts: Mapping[str, float] = field(default_factory=dict)  # metric -> its number: turns, tool calls, ...
    seconds: float = 0.0  # of an episode, from its start to its verdict
    turn_order: tuple[int, ...] = ()
    """Of each sampled segment, in the order in which they were sampled: which of those of `branches` it is.
    Empty where that is their order there."""

    @property
    def branches(self) -> tuple[tuple[Segment, ...], ...]:
        """Each sampled token is a sampled one of exactly one branch."""
        return (self.segments, *self.forks)

    @property
    def turn_tokens(self) -> list[list[int]]:
        """Of each sampled segment."""
        return [s.tokens.tolist() for branch in self.branches for s in branch if s.sampled]

    @property
    def turn_lengths(self) -> list[int]:
        """Tokens of each sampled segment."""
        if not self.forks:  # nearly always, and asked of every rollout of a step
            return [len(s.tokens) for s in self.segments if s.sampled]
        return [len(s.tokens) for branch in self.branches for s in branch if s.sampled]


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a reward function may return in place of one number; one of the two."""

    turns: tuple[Any, ...] = ()  # for each run of sampled tokens: a number, or {name: number}, summed
    tokens: tuple[float, ...] = ()  # for each sampled token


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward function may return where success is something else than a reward of 1."""

    reward: "float | Rewards | Mapping[str, float]"
    correct: bool


@dataclass(frozen=True, slots=True)
class Score:
    """What a verifier says. `error`: why the reward function, or the episode, failed.

    Whether one that failed is scored 0 or dropped follows from its cause (rl/causes.py).
    """

    reward: float  # in all
    error: str | None = None
    parts: Rewards = Rewards()  # how it is spread over the rollout; empty for one reward at the end
    components: Mapping[str, float] = field(default_factory=dict)  # what it is the sum of, by name
    turn_components: tuple[Mapping[str, float], ...] = ()  # the same for each turn, where turns have names
    notes: Mapping[str, Any] = field(default_factory=dict)  # what the episode wrote down for people: JSON
    cause: str = ""  # of an error: a name of rl/causes.py
    verdict: bool | None = None  # the environment's own; None: a reward of 1 is success

    @property
    def is_dropped(self) -> bool:
        """No sample to learn from: the episode failed for a reason that the policy cannot bring about."""
        return self.error is not None and not is_policys(self.cause)

    @property
    def correct(self) -> bool:
        """Success: what accuracy and pass@k count. Never of one that failed."""
        return self.error is None and (is_success(self.reward) if self.verdict is None else self.verdict)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt with their scores: the unit over which advantages are computed."""

    index: int  # the prompt's number in the run, from which its problem and all its seeds follow
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ."""
        return not all_equal([score.reward for score in self.scores if not score.is_dropped])

    def sample_id(self, number: int) -> str:
        """Of the samples that are made of a rollout."""
        return f"{self.rollouts[number].problem.id}, rollout {number}"

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest weights that sampled any of its tokens."""
        versions = [rollout.versions for rollout in self.rollouts if rollout.versions is not None]
        return min(version.oldest for version in versions)

    @property
    def was_sampled(self) -> bool:
        """Whether any of its rollouts came as far as a token."""
        return any(rollout.versions is not None for rollout in self.rollouts)


POLICY = "policy"
"""The name of the adapter that learns in place of the model, in trainer, generators and checkpoints."""

REFERENCE = "reference"
"""The name of the adapter that stays where the policy was, where the policy is an adapter."""


@dataclass(frozen=True)
class LoRA:
    """An adapter (arXiv 2106.09685): output = W x + alpha / rank * B A x, of which A and B learn."""

    rank: NonNegativeInt = 0
    """Rank of A and B; 0 means no adapter: all weights learn."""

    alpha: NonNegativeFloat = 32.0
    """Scale of the adapter's output, divided by the rank."""

    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Which linear layers get an adapter, by the last part of their Hugging Face name."""

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> "LoRA":
        """fields: what dataclasses.asdict gave, through JSON."""
        return cls(**{**fields, "targets": tuple(fields["targets"])})

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class OptimParams:
    """One optimizer step, complete in the call: the controller owns schedules and denominators."""

    lr: float
    grad_scale: float = 1.0  # multiplies the accumulated gradient before clipping: 1 / denominator
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0 turns clipping off
    decay_all: bool = True  # else norms, biases and embeddings are spared the weight decay

    def scaled(self, lr_factor: float, grad_scale: float) -> "OptimParams":
        """With a share of the learning rate, and a gradient scale."""
        return replace(self, lr=self.lr * lr_factor, grad_scale=grad_scale)
