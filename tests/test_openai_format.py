"""Answers in OpenAI's form: which token, with which bytes."""

# holds: exact

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from rl.openai_format import chat_logprobs, text_logprobs
from tests.envs.chat.templates import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer("qwen2_5", tmp_path_factory.mktemp("tokenizer"))


def completion(tokenizer, text, second, second_logprob=-5.0):
    """A text's tokens, each with another one that is less likely."""
    tokens = np.array(tokenizer.encode_plain(text))
    logprobs = np.array([-0.1 * i for i in range(1, len(tokens) + 1)])
    places = tuple(
        ((t, lp), (second, second_logprob)) for t, lp in zip(tokens.tolist(), logprobs.tolist(), strict=True)
    )
    return SimpleNamespace(tokens=tokens, logprobs=logprobs, likeliest=places)


def test_parts_of_characters_and_special_tokens_are_told_apart(tokenizer):
    sampled = completion(tokenizer, "aé<|im_end|>", tokenizer.encode_plain("ü")[1])
    content = chat_logprobs(tokenizer, sampled)["content"]
    assert bytes(byte for place in content for byte in place["bytes"]).decode() == "aé<|im_end|>"
    names = ["a", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert [place["token"] for place in content] == names
    texts = text_logprobs(tokenizer, sampled)
    assert texts["tokens"] == names
    for name, place, logprob in zip(names, texts["top_logprobs"], texts["token_logprobs"], strict=True):
        assert place == {name: logprob, "bytes:\\xbc": -5.0} and next(iter(place)) == name


def test_a_text_that_two_tokens_have_keeps_the_likelier(tokenizer):
    sampled = completion(tokenizer, "a", tokenizer.encode_plain("a")[0])
    assert text_logprobs(tokenizer, sampled)["top_logprobs"] == [{"a": pytest.approx(-0.1)}]


def test_a_token_that_a_schema_forbids_has_a_logprob_that_json_can_write(tokenizer):
    (second,) = tokenizer.encode_plain("b")
    sampled = completion(tokenizer, "a", second, -math.inf)
    for record in (chat_logprobs(tokenizer, sampled), text_logprobs(tokenizer, sampled)):
        assert json.loads(json.dumps(record, allow_nan=False)) == record
    (place,) = chat_logprobs(tokenizer, sampled)["content"]
    assert [entry["logprob"] for entry in place["top_logprobs"]] == [pytest.approx(-0.1), -9999.0]
    assert text_logprobs(tokenizer, sampled)["top_logprobs"] == [{"a": pytest.approx(-0.1), "b": -9999.0}]


def test_every_token_of_a_byte_level_vocabulary_has_its_bytes(tokenizer):
    text = "".join(map(chr, range(32, 3000)))
    tokens = tokenizer.encode_plain(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text
    assert tokenizer.token_bytes(10**6) == b""
