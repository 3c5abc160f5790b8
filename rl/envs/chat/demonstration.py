"""What supervised learning teaches: an answer to a problem, or the assistant's turns of a conversation."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rl.batching import segments_sample, supervised_sample
from rl.envs.base import Env
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.loop import chat_template
from rl.envs.chat.template import Schema
from rl.interfaces import Tokenizer
from rl.types import Message, Problem, Sample, Segment


def taught_answer(env: Env, problem: Problem, text: str, tokenizer: Tokenizer, kind: str) -> Sample:
    """The tokens that a rollout with this answer would have. kind: demonstration, chosen or rejected."""
    if isinstance(env, ChatEnv):
        return _taught_turns(env, problem, [{"role": "assistant", "content": text}], tokenizer, kind)
    target = [*tokenizer.encode_plain(text), env.end_id(problem, tokenizer)]
    return supervised_sample(env.encode(problem, tokenizer).tokens, target, f"{problem.id}, {kind}")


def chat_sample(env: ChatEnv, problem: Problem, seed: int, tokenizer: Tokenizer) -> Sample:
    """The tokens that a rollout with the demonstration's turns would have."""
    return _taught_turns(env, problem, env.chat_demonstration(problem, seed), tokenizer, "demonstration")


def _taught_turns(
    env: ChatEnv, problem: Problem, turns: Sequence[Message], tokenizer: Tokenizer, kind: str
) -> Sample:
    """turns: after the opening."""
    template = chat_template(tokenizer, env.call_format)
    tools = _schemas(env)
    prompt: list[Message] = list(env.opening(problem))
    segments: list[Segment] = []
    for message in turns:
        if message["role"] != "assistant":
            prompt.append(message)
            continue
        tokens = template.continuation(prompt, tools) if segments else template.prompt(prompt, tools)
        target = template.assistant_tokens(message)
        taught = Segment(np.array(target), True, np.zeros(len(target)))
        segments += [Segment.unsampled(tokens), taught]
        prompt = []
    return segments_sample(segments, id=f"{problem.id}, {kind}")


@lru_cache(maxsize=8)
def _schemas(env: ChatEnv) -> list[Schema]:
    """What its tools are called by: milliseconds of pydantic's, or a server's answer, once for a run."""
    return [tool.schema for tool in env.tools()]
