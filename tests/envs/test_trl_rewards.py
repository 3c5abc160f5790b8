"""TRL's own reward functions, and functions of each kind that it takes, through TRL's trainer and through ours.

TRL's side is the method that its trainer calls them with; only the trainer around it is a stand-in.
"""

import asyncio
import functools
import threading
from types import SimpleNamespace

import pytest
import setuptools  # noqa: F401  now: TRL imports it, and it cannot be imported once anything has imported pip

from rl.envs.adapters.trl import TRLTask, _Log
from rl.envs.chat.testing import play
from tests.envs.chat.templates import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer("qwen2_5", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def trainer():
    """A function of rewards: what TRL's trainer would hold of them."""
    import torch
    from accelerate import Accelerator
    from transformers import TrainerState
    from trl.trainer.utils import get_callable_name

    accelerator, loop = Accelerator(cpu=True), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def make(functions):
        logged = {"extra": {}, "metrics": {}}
        return SimpleNamespace(
            accelerator=accelerator,
            reward_funcs=functions,
            reward_processing_classes=[None] * len(functions),
            reward_func_names=[get_callable_name(function) for function in functions],
            reward_weights=torch.ones(len(functions)),
            state=TrainerState(),
            environments=None,
            async_loop=loop,
            args=SimpleNamespace(report_to=[]),
            is_in_train=False,
            _log_completion_extra=lambda column, values: logged["extra"].update({column: values[0]}),
            _log_metric=lambda name, value: logged["metrics"].update({name: value}),
            logged=logged,
        )

    yield make
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def theirs(trainer, functions, row, text, tokens):
    """TRL's rewards, None for no opinion, and what was logged."""
    from trl import GRPOTrainer

    stand_in = trainer(list(functions))
    is_text = isinstance(row["prompt"], str)
    completion = text if is_text else [{"role": "assistant", "content": text}]
    rewards = GRPOTrainer._calculate_rewards(stand_in, [row], [row["prompt"]], [completion], [tokens])
    values = [None if value != value else value for value in rewards[0].tolist()]
    return dict(zip(stand_in.reward_func_names, values, strict=True)), stand_in.logged


def ours(tokenizer, functions, row, text):
    """Our rewards, what was logged, and the tokens of the policy's turn."""
    env = TRLTask(rows=lambda: [row, row], reward_funcs=tuple(functions), num_eval=1, max_new_tokens=10**4)
    assert env.validate() == []
    played = play(env, tokenizer, [text], env.generate(0))
    tokens = [t for s in played.rollout.segments if s.sampled for t in s.tokens.tolist()]
    return played, tokens


TEXTS = (
    r"<think>A third, I think.</think> My answer is \boxed{\frac{1}{3}}",
    r"<think>Half of it \boxed{\frac{1}{3}}</think> so \boxed{\frac{1}{2}}",
    "so so so so so so so so",
    "",
)


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def kinds(prompts, completions, **kwargs):
    """Which of TRL's two formats it got."""
    return [
        1.0 * isinstance(prompt, str) + 2.0 * isinstance(completion, str)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def of_a_column(completions, solution, **kwargs):
    return [float(text in str(completion)) for completion, text in zip(completions, solution, strict=True)]


def no_opinion(prompts, **kwargs):
    return [None] * len(prompts)


def logs(completion_ids, log_extra, log_metric, trainer_state, **kwargs):
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("half", 0.5)
    return [0.25] * len(completion_ids)


async def slow(completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0 if completion else 0.0 for completion in completions]


class Scorer:
    def __call__(self, completions, **kwargs):
        return [0.125 for _ in completions]


class SlowScorer:
    async def __call__(self, completions, **kwargs):
        return [0.0625 for _ in completions]


def scaled(completions, scale, **kwargs):
    return [scale for _ in completions]


FUNCTIONS = (lengths, kinds, of_a_column, no_opinion, logs, slow, Scorer(), SlowScorer(), functools.partial(scaled, scale=3.0))  # fmt: skip


def rewards_of_trl():
    from trl import rewards

    return (
        rewards.accuracy_reward,
        rewards.reasoning_accuracy_reward,
        rewards.get_cosine_scaled_reward(max_len=100),
        rewards.think_format_reward,
        rewards.get_repetition_penalty_reward(ngram_size=2),
        rewards.get_soft_overlong_punishment(max_completion_len=60, soft_punish_cache=30),
    )


def compare(tokenizer, trainer, functions, row, text):
    played, tokens = ours(tokenizer, functions, row, text)
    expected, logged = theirs(trainer, functions, row, text, tokens)
    components = {name: value for name, value in expected.items() if value is not None}
    assert played.score.components == pytest.approx(
        components, abs=0, rel=1e-6
    )  # holds: reference, theirs are float32
    assert played.score.reward == pytest.approx(
        sum(components.values()), rel=1e-6
    )  # holds: reference, theirs are float32
    notes = dict(played.score.notes)
    assert notes.pop("metrics", {}) == logged["metrics"] and notes == logged["extra"]
    return components


@pytest.mark.slow  # it imports TRL
@pytest.mark.parametrize("text", TEXTS)
def test_the_librarys_own_rewards_score_as_beside_it(tokenizer, trainer, text):
    messages = [{"role": "user", "content": "What is a third?"}]
    row = {"prompt": messages, "solution": r"\frac{1}{3}"}
    components = compare(tokenizer, trainer, rewards_of_trl(), row, text)
    assert len(components) == 6


@pytest.mark.slow
def test_a_row_without_a_solution_has_no_opinion_of_accuracy(tokenizer, trainer):
    row = {"prompt": [{"role": "user", "content": "?"}], "solution": "no formula"}
    assert len(compare(tokenizer, trainer, rewards_of_trl(), row, TEXTS[0])) == 3


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "prompt",
    [
        "What is a third?",
        [{"role": "user", "content": "What is a third?"}],
        [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "What is a third?"},
        ],
    ],
    ids=["a text", "a message", "messages"],
)
def test_functions_of_each_kind_get_what_the_trainer_gives_them(tokenizer, trainer, prompt, text):
    row = {"prompt": prompt, "solution": "third", "number": 3, "completion": "x", "completion_ids": [1]}
    seen = []

    def keep(**kwargs):
        seen.append(
            {k: v for k, v in kwargs.items() if k not in ("trainer_state", "log_extra", "log_metric")}
        )
        return [0.0]

    components = compare(tokenizer, trainer, (*FUNCTIONS, keep), row, text)
    assert components["kinds"] == (3.0 if isinstance(prompt, str) else 0.0)
    assert seen[0] == seen[1]


def test_what_a_reward_must_not_do_is_named(tokenizer):
    def step(trainer_state, **kwargs):
        return [trainer_state.global_step]

    def two(**kwargs):
        return [1.0, 2.0]

    row = {"prompt": "x"}
    for function, words in ((step, "global_step is not known"), (two, "two returned"), (no_opinion, "no reward has an opinion")):  # fmt: skip
        with pytest.raises(Exception, match=words):
            ours(tokenizer, [function], row, "y")
    env = TRLTask(rows=lambda: [row, row], reward_funcs=(two,), num_eval=1)
    for change, words in (
        ({"reward_funcs": ("a/model",)}, "give functions"),
        ({"reward_weights": (1.0, 2.0)}, "one for each"),
        ({"environment_factory": {"a": Scorer}}, "one environment"),
    ):
        assert words in TRLTask(**{**vars(env), **change}).validate()[0]


def test_weights_and_functions_of_one_name(tokenizer):
    row = {"prompt": "x"}
    functions = (functools.partial(scaled, scale=3.0), functools.partial(scaled, scale=5.0))
    env = TRLTask(rows=lambda: [row, row], reward_funcs=functions, reward_weights=(1.0, 0.5), num_eval=1)
    assert play(env, tokenizer, ["y"], env.generate(0)).score.components == {"scaled": 3.0, "scaled_2": 2.5}


class Counting:
    """An environment of the kind that TRL's factory makes."""

    def reset(self, **row):
        self.count, self.row = 0, row
        return " Count."

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: how many.
        """
        self.count += number
        return self.count

    @property
    def broken(self):
        raise RuntimeError("a property was run")

    async def get_reward(self):
        return float(self.count)


class Seeded:
    """An environment whose reset takes no prompt."""

    def reset(self, seed):
        return f" Seed {seed}."

    def get_reward(self):
        return 1.0


def test_reset_has_a_prompt_only_where_the_row_has_one(tokenizer):
    env = TRLTask(rows=lambda: [{"seed": 1}, {"seed": 2}], environment_factory=Seeded, num_eval=1)
    rollout = play(env, tokenizer, ["y"], env.generate(1))
    assert rollout.score.error is None and rollout.score.reward == 1.0
    assert rollout.rollout.messages[0]["content"] == " Seed 2."


def test_what_reset_says_is_another_part_of_a_message_of_parts(tokenizer):
    parts = [{"type": "text", "text": "Go"}]
    row = {"prompt": [{"role": "user", "content": parts}]}
    env = TRLTask(rows=lambda: [row, row], environment_factory=Counting, num_eval=1)
    rollout = play(env, tokenizer, ["y"], env.generate(1))
    assert rollout.rollout.messages[0]["content"] == [*parts, {"type": "text", "text": " Count."}]


def test_environments_rewards_and_messages_of_calls(tokenizer):
    seen = []

    def look(prompts, completions, environments, **kwargs):
        seen.append((prompts[0], completions[0], environments[0].count))
        return [0.5]

    env = TRLTask(
        rows=lambda: [{"level": 1}, {"level": 2}],
        reward_funcs=(look,),
        environment_factory=Counting,
        num_eval=1,
    )
    assert env.validate() == []
    call = '<tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call>'
    played = play(env, tokenizer, [call, "done"], env.generate(1))
    assert played.score.components == {"look": 0.5, "environment": 2.0}
    prompt, completion, count = seen[0]
    assert prompt == [{"role": "user", "content": " Count."}] and count == 2
    assert completion == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"number": 2}}}],
        },
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "done"},
    ]


def test_a_column_called_metrics_takes_the_place_of_the_metrics():
    notes = {}
    log = _Log(notes)
    log.metric("half", 0.5)
    assert notes == {"metrics": {"half": 0.5}}
    log.extra("metrics", ["mine"])
    log.metric("whole", 1.0)
    assert notes == {"metrics": "mine"}
