"""The tokenizer of single characters."""

import subprocess
import sys

import pytest

from rl.models.sources import ModelDir, TinyQwen3, write_character_tokenizer
from rl.models.tokenizer import HFTokenizer

BREAKS = "\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029 \u00a0"
"""What some regular expression takes for the end of a line, or for nothing."""
TEXTS = [
    *BREAKS,
    *(2 * character for character in BREAKS),
    *(f"a{character * 3}b" for character in BREAKS),
    BREAKS,
    "e\u0301",  # two characters that are drawn as one
    "\U0001f468\u200d\U0001f469",
    "",
]


@pytest.fixture(scope="module")
def alphabet():
    return "".join(sorted(set("".join(TEXTS)) | set("ab")))


@pytest.fixture(scope="module")
def tokenizer(alphabet, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_character_tokenizer(alphabet, path)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    return HFTokenizer(path)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_each_character_of_the_alphabet_is_one_token(tokenizer, alphabet, text):
    tokens = tokenizer.encode_plain(text)
    assert tokens == [3 + alphabet.index(character) for character in text]
    assert tokenizer.decode(tokens) == text


def test_so_is_the_models_own(alphabet):
    tokenizer = TinyQwen3(alphabet).tokenizer()
    assert len(tokenizer.encode_plain(BREAKS * 2)) == 2 * len(BREAKS)


def test_it_is_the_tokenizer_that_transformers_takes(tokenizer, alphabet, tmp_path):
    from transformers import AutoTokenizer

    path = TinyQwen3(alphabet + ">[](),=").materialize(tmp_path)
    ours, theirs = HFTokenizer(path), AutoTokenizer.from_pretrained(path)
    assert type(ours._tokenizer) is type(theirs)
    assert ours._tokenizer.get_vocab() == theirs.get_vocab()
    assert (ours.eos_id, ours.chat_template) == (theirs.eos_token_id, theirs.chat_template)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_a_check_of_a_tiny_model_imports_no_models(tmp_path):
    """AutoTokenizer imports torch's compiler: two of the five seconds that `rl check quickstart` took."""
    program = (
        "import sys\n"
        "from rl.models.sources import TinyQwen3\n"
        "TinyQwen3('ab').tokenizer()\n"
        "print([name for name in ('torch._dynamo', 'transformers.models.auto.auto_factory') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_directory_has_one_tokenizer_until_a_file_changes(tmp_path, monkeypatch):
    path = TinyQwen3("ab>[](),=").materialize(tmp_path)
    source, loads = ModelDir(str(path)), []
    load = HFTokenizer.__init__
    monkeypatch.setattr(HFTokenizer, "__init__", lambda self, *a: (loads.append(a), load(self, *a))[1])
    assert source.tokenizer() is source.tokenizer()
    assert source.why_no_chat() == "" and source.unknown_characters("abc") == "c"
    assert source.not_one_token(["a", "ab"]) == ["ab"] and len(loads) == 1
    write_character_tokenizer("abc>[](),=", path)
    assert source.unknown_characters("abc") == "" and len(loads) == 2


def test_a_system_turn_comes_before_the_users_where_there_is_one():
    tokenizer = TinyQwen3("ab>[](),=").tokenizer()
    assert tokenizer.encode_chat("b", "a") == [1, 3, 5, 4, 5]
    assert tokenizer.encode_chat("b") == [1, 4, 5]


@pytest.mark.parametrize("count", [1, 61, 62, 67, 125])
def test_each_character_has_a_row_of_the_embedding_and_a_text_of_several_is_no_token(count):
    alphabet = "".join(chr(0x4E00 + i) for i in range(count))
    model = TinyQwen3(alphabet)
    assert model.config()["vocab_size"] == next(size for size in (64, 128) if size >= 3 + count)
    several = ["", "a", 2 * alphabet[0], *([alphabet] if count > 1 else [])]
    assert model.not_one_token([alphabet[0], *several]) == several
