"""What is wrong with demonstrations and preferences: some are made as a run makes them, before it starts."""

from collections.abc import Iterator, Sequence

from rl.config.env_rules import without_token
from rl.config.run import RunConfig
from rl.envs.base import derive_seed
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.demonstration import chat_sample, taught_answer
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.loop import chat_template
from rl.envs.chat.messages import wrong_with
from rl.errors import ConfigError, one_line
from rl.fields import shown
from rl.interfaces import Tokenizer
from rl.types import Problem

_NUM_MADE = 8


def check_taught(config: RunConfig, tokenizer: Tokenizer, limit: int) -> list[str]:
    """One line, or none. limit: tokens of the longest sequence."""
    if not (config.warmup.steps or config.data != "rollouts"):
        return []
    name = type(config.env).__name__
    try:
        for number in range(_NUM_MADE):
            seed = derive_seed(config.seed, "taught", number)
            problem = config.env.train_problem(seed)
            taught = list(_taught(config, problem, seed, tokenizer))
            for text, num_tokens in taught:
                if problems := without_token(config.model, text):
                    return problems
                if num_tokens > limit:
                    return [
                        f"what env {name} teaches of the problem {shown(problem.id)} has {num_tokens} tokens "
                        f"with its prompt, and a sequence has {limit} (the model's positions, max_seq_len); "
                        f"shorten it"
                    ]
            if config.data == "preferences" and (
                problems := _pair_without_room(config, problem, taught, tokenizer)
            ):
                return problems
    except ConfigError as error:
        return [str(error)]
    except Exception as error:  # the user's own code
        return [f"env {name} failed to teach anything ({one_line(error)}); fix it, or its settings"]
    return []


def _pair_without_room(
    config: RunConfig, problem: Problem, pair: Sequence[tuple[str, int]], tokenizer: Tokenizer
) -> list[str]:
    """A pair is in one micro-batch; what both begin with is computed once where prefixes are shared."""
    size, limit = sum(num_tokens for _, num_tokens in pair), config.trainer.micro_batch_tokens
    if config.trainer.share_prefixes and not (config.trainer.engine == "hf" and config.trainer.dropout):
        without_text = taught_answer(config.env, problem, "", tokenizer, "prompt")
        size -= len(without_text.tokens) - 1
    if size <= limit:
        return []
    return [
        f"the pair of answers to the problem {shown(problem.id)} has {size} tokens, and a micro-batch, which "
        f"has to hold both, trainer.micro_batch_tokens={limit}; raise that, or shorten them"
    ]


def _taught(
    config: RunConfig, problem: Problem, seed: int, tokenizer: Tokenizer
) -> Iterator[tuple[str, int]]:
    """(what is taught, tokens of the whole sequence), one or a pair. Raises ConfigError."""
    env = config.env
    if config.data == "preferences" and isinstance(env, AgentEnv):
        raise ConfigError(
            f"env {type(env).__name__} begins no conversation itself, so data=preferences has nothing to put "
            f"its answers behind; use a ChatEnv, or an Env"
        )
    if config.data == "preferences":
        texts = list(env.preference(problem, seed))
    elif isinstance(env, ChatEnv):
        opening, demonstration = list(env.opening(problem)), list(env.chat_demonstration(problem, seed))
        turns = [*opening, *demonstration]
        for method, made in (("opening", opening), ("chat_demonstration", demonstration)):
            for turn in made:
                if wrong := wrong_with(turn):
                    raise ConfigError(f"{type(env).__name__}.{method}() returned {shown(turn)}: {wrong}")
        template = chat_template(tokenizer, env.call_format)
        written = [template.written_turn(turn) for turn in turns if turn["role"] == "assistant"]
        yield "".join(written), len(chat_sample(env, problem, seed, tokenizer).tokens)
        return
    else:
        texts = [env.demonstration(problem, seed)]
    for text in texts:
        yield text, len(taught_answer(env, problem, text, tokenizer, "taught").tokens)
