"""`rl eval MODEL RECIPE`: a model that does not fit the recipe is refused, before any process starts."""

# holds: exact

import string

import pytest

from rl.controller import evaluate as evaluation
from rl.controller.evaluate import evaluate
from rl.errors import ConfigError
from rl.models.sources import ModelDir, TinyQwen3
from rl.models.tokenizer import HFTokenizer
from tests.tiny import write_model

RECIPE = """
import string
from dataclasses import dataclass, replace
from configs.quickstart import quickstart
from rl.config import RunConfig, WarmupConfig
from rl.envs.base import Env
from rl.models.sources import TinyQwen3
from rl.types import Problem

@dataclass(frozen=True)
class Sums(Env):
    def generate(self, seed):
        return Problem(str(seed), {question}, "7")
    def reward(self, problem, response, stop):
        return 0.0

def sums() -> RunConfig:
    env = Sums(num_eval=8, max_new_tokens=4, chat={chat})
    model = TinyQwen3(alphabet=string.printable)
    return replace(quickstart(), env=env, model=model, warmup=WarmupConfig())
"""


class Started(Exception):
    """What would be started."""


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """What `rl eval` says of a model on a recipe of sums: its lines, or none where it would start."""
    monkeypatch.chdir(tmp_path)

    def launch(*_, **__):
        raise Started

    monkeypatch.setattr(evaluation, "launch", launch)

    def lines(alphabet, question='f"{seed}+3"', chat=False, length=32):
        (tmp_path / "mine.py").write_text(RECIPE.format(question=question, chat=chat))
        model = TinyQwen3(alphabet=alphabet, max_length=length).materialize(tmp_path)
        write_model(model, max_position_embeddings=length)
        try:
            evaluate([str(model), str(tmp_path / "mine.py")])
        except ConfigError as error:
            return str(error).splitlines()
        except Started:
            return []

    return lines


def test_a_model_that_fits_is_started(evaluated):
    assert evaluated(string.digits + "+") == []


@pytest.mark.parametrize("lacking", "+37")
def test_a_vocabulary_without_the_tasks_characters(lacking, evaluated):
    (line,) = evaluated((string.digits + "+").replace(lacking, ""))
    assert line.startswith(
        f"the task uses characters that the model's tokenizer lacks: {lacking!r}; use another"
    )


def test_a_prompt_that_leaves_no_room(evaluated):
    """The longest of the problems: those before it would be answered."""
    for digits in (29, 30, 31, 40):
        question = f"'1' * {digits} + str(seed % 1000) if seed % 3 else str(seed)"
        lines = evaluated(string.digits, question)
        assert len(lines) == 1 and "which leaves no room for an answer in 32 tokens" in lines[0]
    assert evaluated(string.digits, "'1' * 20 + str(seed % 1000)") == []


def test_a_model_without_a_chat_template(evaluated):
    (line,) = evaluated(string.digits + "+", chat=True)
    assert "the model's tokenizer has no chat template; set --env.chat False" in line


def test_characters_of_a_tokenizer_of_bytes_and_of_words(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory = TinyQwen3(alphabet="ab").materialize(tmp_path)
    assert HFTokenizer(directory).unknown_characters("abcba d") == " cd"
    assert ModelDir(str(directory)).unknown_characters("abc") == "c"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*letters, "<eos>"])}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel()
    of_bytes.save(str(directory / "tokenizer.json"))
    assert HFTokenizer(directory).unknown_characters("aé漢\n") == ""
    assert ModelDir(str(tmp_path / "nowhere")).unknown_characters("x") == ""
