"""episode.answers are the policy's turns: never an assistant's message that stood in the prompt."""

# holds: exact

import copy
from dataclasses import dataclass

import openai
import pytest

from rl.envs.adapters.nemo_gym import _items
from rl.envs.chat.agent import AgentEnv
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.tools import tool
from rl.types import Problem, StopReason
from tests.envs.chat.playing import play_here
from tests.envs.chat.templates import make_tokenizer
from tests.envs.chat.words import Writer

EXAMPLE = (
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "2 + 2?"},
)
SEEN = []


class Noting:
    def reward_episode(self, episode):
        answers, num_turns = list(episode.answers), len(episode.turn_tokens)
        items = list(_items(episode.messages[episode.num_opening :]))
        SEEN.append((answers, num_turns, episode.response, items))
        return float(len(answers))

    def reward_group(self, episodes):
        SEEN.extend([(list(e.answers), len(e.turn_tokens), e.response, []) for e in episodes])
        return [0.0 for _ in episodes]


@dataclass(frozen=True)
class Talk(Noting, ChatEnv):
    max_turns: int = 2

    def step(self, episode):
        said = [{"role": "assistant", "content": "three"}, {"role": "user", "content": "and 3 + 3?"}]
        return said if len(episode.answers) == 1 else None


@dataclass(frozen=True)
class Agent(Noting, AgentEnv):
    max_turns: int = 2

    def agent(self, episode, base_url, api_key):
        messages = list(EXAMPLE)
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for question in ("and 3 + 3?", "thanks"):
                reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
                messages += [
                    {"role": "assistant", "content": reply.content},
                    {"role": "user", "content": question},
                ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer("qwen2_5", tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("env", [Talk(), Agent()], ids=["turn loop", "agent"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_the_prompts_own_assistant_is_not_the_policy(tokenizer, env, is_cut):
    SEEN.clear()

    class ByTurn:
        """Of each episode, whatever their order."""

        async def sample(self, prompt, n, params):
            turn = ("six", is_cut) if "four" in tokenizer.decode(prompt) else ("four", False)
            return await Writer(tokenizer, tokenizer.eos_id, [turn]).sample(prompt, n, params)

    rollouts = play_here(env, tokenizer, ByTurn(), Problem("1", "", messages=EXAMPLE), n=2)
    assert [(rollout.score.error, rollout.score.reward) for rollout in rollouts] == [(None, 2)] * 2
    assert [row[:3] for row in SEEN] == [(["four", "six"], 2, "six")] * 4  # two of reward_group
    if isinstance(env, Talk):  # a server that verifies gets what followed the prompt
        assert [item["content"][0]["text"] for item in SEEN[0][3]] == ["four", "three", "six"]
    assert not any("given" in message for rollout in rollouts for message in rollout.messages)


OWN, COMPARED = [], []
FIELDS = (
    "problem", "messages", "stop", "turn_tokens", "answers", "turn_texts", "num_opening", "tool_results", "notes",
)  # fmt: skip


@dataclass(frozen=True)
class Compared(ChatEnv):
    max_turns: int = 2

    @tool
    def look(self) -> str:
        """Look."""
        return "a four"

    def reward_episode(self, episode):
        episode.notes["answers"] = len(episode.answers)
        OWN.append({name: copy.deepcopy(getattr(episode, name)) for name in FIELDS})
        return 0.0

    def reward_group(self, episodes):
        COMPARED.extend({name: getattr(episode, name) for name in FIELDS} for episode in episodes)
        return [1.0 for _ in episodes]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_group_is_compared_by_all_that_its_episodes_were_rewarded_for(tokenizer, is_cut):
    OWN.clear(), COMPARED.clear()

    class ByTurn:
        async def sample(self, prompt, n, params):
            call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
            turn = ("six", is_cut) if "a four" in tokenizer.decode(prompt) else (call, False)
            return await Writer(tokenizer, tokenizer.eos_id, [turn]).sample(prompt, n, params)

    problem = Problem("1", "", messages=EXAMPLE)
    rollouts = play_here(Compared(), tokenizer, ByTurn(), problem, n=2)
    assert [rollout.score.reward for rollout in rollouts] == [1.0, 1.0]
    assert len(OWN) == 2 and COMPARED == OWN
    (results,) = OWN[0]["tool_results"]
    assert results and OWN[0]["notes"] == {"answers": 2} and OWN[0]["num_opening"] == len(EXAMPLE)
    assert OWN[0]["stop"] is (StopReason.LENGTH if is_cut else StopReason.STOP)
