"""What supervised learning learns from a ChatEnv: of a conversation, the assistant's turns."""

from functools import lru_cache

import numpy as np

from rl.batching import segments_sample
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.loop import chat_template
from rl.envs.chat.template import Schema
from rl.interfaces import Tokenizer
from rl.types import Message, Problem, Sample, Segment


def chat_sample(env: ChatEnv, problem: Problem, seed: int, tokenizer: Tokenizer) -> Sample:
    """The tokens that a rollout with these turns would have."""
    template = chat_template(tokenizer, env.call_format)
    tools = _schemas(env)
    prompt: list[Message] = list(env.opening(problem))
    segments: list[Segment] = []
    for message in env.chat_demonstration(problem, seed):
        if message["role"] != "assistant":
            prompt.append(message)
            continue
        tokens = template.continuation(prompt, tools) if segments else template.prompt(prompt, tools)
        target = template.assistant_tokens(message)
        taught = Segment(np.array(target), True, np.zeros(len(target)))
        segments += [Segment.unsampled(tokens), taught]
        prompt = []
    return segments_sample(segments, id=f"{problem.id}, demonstration")


@lru_cache(maxsize=8)
def _schemas(env: ChatEnv) -> list[Schema]:
    """What its tools are called by: milliseconds of pydantic's, or a server's answer, once for a run."""
    return [tool.schema for tool in env.tools()]
