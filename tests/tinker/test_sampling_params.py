"""What a client asks of a sample, as it reaches the generator: each field, and the edge of each bound."""

import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")

from types import SimpleNamespace

from rl.tinker.backend import ContextExceeded, UserError
from rl.tinker.sampling import _MAX_LIKELIEST, Sampling
from rl.types import SamplingParams

CONTEXT, VOCABULARY, EOS = 16, 100, 7


def read(prompt=(1, 2), num_samples=1, sampling=None, chunks=None, **body):
    """The prompt's tokens and the parameters, of a request with these fields."""
    service = object.__new__(Sampling)
    service._backend = SimpleNamespace(context_length=CONTEXT, vocab_size=VOCABULARY)
    service._max_samples, service._eos_ids = 4, (EOS,)
    asked = {"temperature": 1.0, "top_p": 1.0, "top_k": -1} | (sampling or {})
    chunks = chunks or [{"type": "encoded_text", "tokens": [token]} for token in prompt]
    return service._read(
        {"prompt": {"chunks": chunks}, "num_samples": num_samples, "sampling_params": asked} | body
    )


def test_every_field_reaches_the_generator():
    tokens, params = read(
        (3, 4, 5),
        sampling={"temperature": 0.5, "top_p": 0.25, "top_k": 9, "max_tokens": 6, "seed": 2**31 + 11, "stop": [8, "end", 9]},
        topk_sample_logprobs=2, topk_prompt_logprobs=3, prompt_logprobs=True, json_schema="{}",
    )  # fmt: skip
    assert tokens == [3, 4, 5]
    assert params == SamplingParams(
        max_new_tokens=6, temperature=0.5, seed=11, stop_token_ids=(EOS, 8, 9), top_k=9, top_p=0.25,
        stop_texts=("end",), json_schema="{}", ignore_eos=True, num_likeliest=2, prompt_likeliest=3,
    )  # fmt: skip


def test_what_is_left_out():
    _, params = read((1,) * 10)
    assert params.max_new_tokens == CONTEXT - 10 and params.stop_token_ids == (EOS,) and not params.stop_texts
    assert params.num_likeliest == 0 and params.prompt_likeliest is None and 0 <= params.seed < 2**31
    assert len({read()[1].seed for _ in range(5)}) == 5  # drawn anew
    assert read(sampling={"stop": []})[1].stop_token_ids == ()
    assert read(sampling={"stop": "end"})[1].stop_texts == ("end",)
    assert read(prompt_logprobs=True)[1].prompt_likeliest == 0
    assert read(topk_prompt_logprobs=1)[1].prompt_likeliest == 1
    assert read((1,) * 10, sampling={"max_tokens": CONTEXT - 10})[1].max_new_tokens == CONTEXT - 10


def test_a_context_that_is_exceeded_is_refused_in_tinkers_words():
    """Programs end an episode by them, and by the status; an answer cut short in silence would be learned from."""
    with pytest.raises(ContextExceeded) as refused:
        read((1,) * 10, sampling={"max_tokens": CONTEXT - 9})
    assert str(refused.value) == (
        "Prompt length plus max_tokens exceeds the model's context window: 10 prompt tokens + "
        f"{CONTEXT - 9} max_tokens > {CONTEXT}"
    )
    with pytest.raises(ContextExceeded, match="context window"):
        read((1,) * CONTEXT)


@pytest.mark.parametrize(
    ("taken", "refused", "match"),
    [
        ({"prompt": (0, 1)}, {"prompt": (1, -1)}, "outside the vocabulary of 100"),
        ({"prompt": (1, 99)}, {"prompt": (1, 100)}, "outside the vocabulary of 100"),
        ({"prompt": (99,)}, {"prompt": (100, 1)}, "outside the vocabulary of 100"),
        ({"prompt": (1,) * 15}, {"prompt": (1,) * 16}, "a prompt of 16 tokens; it has to have 1 to 15"),
        ({"prompt": (1,)}, {"prompt": ()}, "a prompt of 0 tokens"),
        ({"num_samples": 1}, {"num_samples": 0}, "num_samples=0; it has to be 1 to 4"),
        ({"num_samples": 4}, {"num_samples": 5}, "num_samples=5; it has to be 1 to 4"),
        ({"sampling": {"top_p": 1.0}}, {"sampling": {"top_p": 1.01}}, "top_p=1.01"),
        ({"sampling": {"top_p": 0.01}}, {"sampling": {"top_p": 0}}, "top_p=0"),
        ({"sampling": {"top_k": 1}}, {"sampling": {"top_k": 0}}, "top_k=0"),
        ({"sampling": {"top_k": -1}}, {"sampling": {"top_k": -2}}, "top_k=-2"),
        ({"sampling": {"temperature": 0}}, {"sampling": {"temperature": -0.1}}, "temperature=-0.1"),
        ({"sampling": {"max_tokens": 1}}, {"sampling": {"max_tokens": 0}}, "max_tokens=0"),
        ({"sampling": {"stop": [99]}}, {"sampling": {"stop": [100]}}, "the stop token 100 is outside"),
        ({"sampling": {"stop": [0]}}, {"sampling": {"stop": [-1]}}, "the stop token -1 is outside"),
        ({"sampling": {"stop": ["x"]}}, {"sampling": {"stop": ["x", ""]}}, "an empty stop string"),
        ({"topk_sample_logprobs": _MAX_LIKELIEST}, {"topk_sample_logprobs": _MAX_LIKELIEST + 1}, "at most"),
        ({"topk_prompt_logprobs": _MAX_LIKELIEST}, {"topk_prompt_logprobs": _MAX_LIKELIEST + 1}, "at most"),
        ({"topk_sample_logprobs": 0}, {"topk_sample_logprobs": -1}, "at most"),
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 1},
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
            "prompt_logprobs_last_n=2; it has to be 1 to 1",
        ),
        ({}, {"prompt_logprobs_last_n": 1}, "with prompt_logprobs"),
    ],
)
def test_the_last_that_is_taken_and_the_first_that_is_not(taken, refused, match):
    read(**taken)
    with pytest.raises(UserError, match=match):
        read(**refused)


def test_a_chunk_that_is_no_text_is_named():
    with pytest.raises(UserError, match="a chunk of type 'image'; only encoded_text is offered here"):
        read(chunks=[{"type": "encoded_text", "tokens": [1]}, {"type": "image"}])
