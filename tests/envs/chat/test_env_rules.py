"""What is wrong with a ChatEnv is said before anything starts."""

import re
import subprocess
import sys
from dataclasses import dataclass, replace

import openai
import pytest

from configs.calculator import calculator
from rl.config import WarmupConfig
from rl.config.env_rules import check_chat_env, check_env
from rl.config.validate import validate
from rl.envs.adapters.verifiers_base import VerifiersBase
from rl.envs.calculator import Calculator
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.testing import play
from rl.envs.chat.tools import tool
from rl.types import Problem


@dataclass(frozen=True)
class Fine(ChatEnv):
    num_eval: int = 2

    def generate(self, seed):
        return Problem(str(seed), str(seed))

    def reward_episode(self, episode):
        return 1.0

    def demonstration(self, problem, seed):
        return "1"


@dataclass(frozen=True)
class Untyped(Fine):
    @tool
    def use(self, it: subprocess.Popen) -> str:
        """Use it."""


@dataclass(frozen=True)
class Undescribed(Fine):
    @tool
    def use(self, it) -> str:
        """Use it."""


@dataclass(frozen=True)
class Undocumented(Fine):
    @tool
    def use(self, it: str) -> str: ...


@dataclass(frozen=True)
class Program(Fine, AgentEnv):
    command: tuple[str, ...] = (sys.executable,)


@dataclass(frozen=True)
class OwnAgent(Fine, AgentEnv):
    def agent(self, episode, base_url, api_key): ...


class Undecorated(Fine):
    max_turns: int = 2


@dataclass(frozen=True)
class Unmade(ChatEnv):
    def reward_episode(self, episode):
        return 1.0


@dataclass(frozen=True)
class Unrewarded(ChatEnv):
    num_eval: int = 2

    def generate(self, seed):
        return Problem(str(seed), str(seed))


@dataclass(frozen=True)
class BadDemonstration(Fine):
    def chat_demonstration(self, problem, seed):
        return [{"role": "user", "content": "x"}]


@dataclass(frozen=True)
class BadOpening(Fine):
    def opening(self, problem):
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]

    def chat_demonstration(self, problem, seed):
        return [{"role": "assistant", "content": "x"}]


@dataclass(frozen=True)
class Library(VerifiersBase):
    """Reads `variables`, as the adapters of verifiers do."""

    def generate(self, seed):
        return Problem(str(seed), str(seed), "2")

    def agent(self, episode, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": "1+1"}]
        client.chat.completions.create(model="any", messages=messages)


def test_variables_are_read_by_an_environment_of_verifiers():
    assert problems(Library(variables=("KEY",)), warmup=WarmupConfig()) == []


def problems(env, **changes):
    return validate(replace(calculator(), env=env, **changes))


def test_the_recipe_is_fine():
    assert validate(calculator()) == [] and check_env(calculator()) == []


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (Calculator(chat=False), "env.chat=False has no effect on a ChatEnv"),
        (Calculator(stop=(">",)), "env.stop has no effect on a ChatEnv"),
        (Program(prompt_prefix="12"), "env.prompt_prefix has no effect on env.command"),
        (Program(max_result_chars=5), "env.max_result_chars has no effect on env.command"),
        (OwnAgent(variables=("KEY",)), "env.variables has no effect without env.command"),
        (Library(prompt_prefix="12"), "env.prompt_prefix has no effect on an environment of verifiers"),
        (Library(max_result_chars=5), "env.max_result_chars has no effect on an environment of verifiers"),
        (Library(command=("true",)), "env.command has no effect on an environment of verifiers"),
        (Untyped(), "the tool use cannot be described"),
        (Undescribed(), "the tool use has no type hint for it"),
        (Undocumented(), "the tool use has no docstring"),
        (Undecorated(), "add @dataclass(frozen=True)"),
        (Unmade(), "has no generate(self, seed)"),
        (Unrewarded(), "has no reward_episode(self, episode), or reward(self, problem, response, stop)"),
        (BadDemonstration(), "chat_demonstration() returned"),
        (BadOpening(), "BadOpening.opening() returned"),
        (Calculator(max_turns=0), "env.max_turns"),
        (Calculator(turn_seconds=0.0), "env.turn_seconds"),
        (Calculator(call_format="xml"), "env.call_format"),
    ],
)
def test_what_is_wrong_is_named(env, said):
    found = problems(env, warmup=WarmupConfig()) if isinstance(env, Library) else problems(env)
    assert any(said in line for line in found), found


def test_bounds_hold_where_a_subclass_annotates_a_field_again():
    @dataclass(frozen=True)
    class Short(Calculator):
        max_turns: int = 0

    assert any("env.max_turns" in line for line in problems(Short()))


def test_an_environment_is_tried_without_a_model_or_a_run():
    env, tokenizer = Calculator(), calculator().model.tokenizer()
    problem = Problem("1", "12*3", "36", {"name": "mul", "a": 12, "b": 3})
    played = play(env, tokenizer, ["[mul(a=12,b=3)]", "36"], problem)
    assert played.score.reward == 1
    assert played.text == "<bos>12*3>[mul(a=12,b=3)]<eos>36>36<eos>"
    assert play(env, tokenizer, ["12"], problem).score.reward == 0


def test_a_model_whose_template_cannot_be_written_is_refused():
    config = calculator()
    found = validate(replace(config, model=replace(config.model, alphabet="0123456789+*>")))
    assert any("has no chat template; a ChatEnv needs one" in line for line in found), found
    assert check_chat_env(config.env, config.model.tokenizer()) == []


@dataclass(frozen=True)
class Teaches(Calculator):
    """What is taught is seen to be wrong of some problems only."""

    mistake: str = ""

    def chat_demonstration(self, problem, seed):
        turns = super().chat_demonstration(problem, seed)
        if seed % 3 == 1:
            last = dict(turns[-1])
            if self.mistake == "length":
                last["content"] = "12 " * 3000
            if self.mistake == "characters":
                last["content"] = "The Answer"
            if self.mistake == "calls":
                last["tool_calls"] = [{"name": "get", "arguments": {}}]
            if self.mistake == "raises":
                last["content"] = problem.metadata["answer"]
            return [*turns[:-1], last]
        return turns


@pytest.mark.parametrize(("mistake", "words"), [
    ("length", "what env Teaches teaches of the problem .* tokens with its prompt, and a sequence has [0-9]+ .*; shorten it"),
    ("characters", "the task uses characters that model.alphabet lacks: 'AT.*'; add them"),
    ("calls", r"Teaches.chat_demonstration\(\) returned .*: tool_calls is a list of"),
    ("raises", "env Teaches failed to teach anything .KeyError: 'answer'.; fix it"),
])  # fmt: skip
def test_what_a_warm_up_would_teach_is_looked_at_before(mistake, words):
    warmup = replace(calculator().warmup, steps=5)
    assert problems(Teaches(), warmup=warmup) == []
    (line,) = problems(Teaches(mistake=mistake), warmup=warmup)
    assert re.search(words, line), line
    assert problems(Teaches(mistake=mistake), warmup=WarmupConfig()) == []


@dataclass(frozen=True)
class Tried(AgentEnv):
    def start(self, episode):
        episode.state["started"] = True

    def agent(self, episode, base_url, api_key):
        messages = [{"role": "user", "content": episode.problem.question}]
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            reply = client.chat.completions.create(model="any", messages=messages)
        episode.notes["read"] = reply.choices[0].message.content

    def reward_episode(self, episode):
        return float(episode.state["started"])


def test_an_agent_is_tried_after_its_start_and_leaves_its_notes():
    played = play(Tried(), calculator().model.tokenizer(), ["36"], Problem("1", "12*3"))
    assert (played.score.reward, played.score.notes) == (1.0, {"read": "36"})


def test_a_trial_in_which_the_policy_says_nothing_is_refused():
    with pytest.raises(ValueError, match=r"play\(\) has no texts for the policy; give at least one"):
        play(Calculator(), calculator().model.tokenizer(), [])


def test_an_episode_samples_what_its_turns_may_and_no_more_than_a_sequence_holds():
    env = Calculator(max_new_tokens=20, max_turns=3)
    assert env.most_sampled(100) == 60 and env.most_sampled(50) == 50
    agent = AgentEnv(max_new_tokens=20, max_turns=3)  # each of its conversations may be so long
    assert agent.most_sampled(100) == agent.most_sampled(50) == 60


@pytest.mark.parametrize(("command", "times"), [((), 1), (("true",), 0)])
def test_what_openais_client_loads_is_loaded_for_agents_that_use_it(command, times, monkeypatch):
    loads = []
    monkeypatch.setattr("rl.envs.chat.agent._load_openai", lambda: loads.append(1))
    AgentEnv(command=command).prepare()
    assert len(loads) == times


def test_an_agent_that_is_neither_a_command_nor_a_method_says_so():
    with pytest.raises(NotImplementedError, match="an AgentEnv needs env.command, or agent"):
        AgentEnv().agent(None, "http://127.0.0.1:1/v1", "key")
