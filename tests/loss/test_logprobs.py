"""Logprobs and entropy from logits, against float64."""

# holds: exact, fp32 against float64 on a few small numbers

import pytest
import torch

from rl.loss.logprobs import _CACHED_ELEMENTS, logprobs_and_entropy


def test_logprobs_and_entropy_are_fp32_whatever_the_logits():
    torch.manual_seed(0)
    logits = torch.randn(5, 11).bfloat16()
    targets = torch.arange(5)
    reference = logits.double().log_softmax(-1)
    logits.requires_grad_()
    exact = logits.detach().double().requires_grad_()
    weights = torch.randn(5)
    logprobs, entropy = logprobs_and_entropy(logits, targets)
    expected = exact.log_softmax(-1)[torch.arange(5), targets]
    assert torch.allclose(logprobs.double(), expected, atol=1e-6)
    assert torch.allclose(entropy.double(), -(reference.exp() * reference).sum(-1), atol=1e-6)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    # bf16 logits get a bf16 gradient: each number as near as bf16 can be, but for what fp32 rounded before.
    own_error = (exact.grad.bfloat16() - exact.grad).abs()
    fp32 = 16 * torch.finfo(torch.float32).eps * exact.grad.abs().max()
    assert ((logits.grad - exact.grad).abs() <= own_error + fp32).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_over_a_large_vocabulary_is_as_near_as_fp32_can_be(dtype):
    """A peaked distribution with a long tail: nearly all of its mass is in few tokens."""
    torch.manual_seed(0)
    logits = torch.randn(8, 50_000) * 2.5 + 12
    logits[:, 7], logits[:, 8] = 32.0, 28.0
    logits = logits.to(dtype)
    exact = logits.double().log_softmax(-1)
    expected = -(exact.exp() * exact).sum(-1)
    by_torch = logits.float().log_softmax(-1)
    own_error = (-(by_torch.exp() * by_torch).sum(-1) - expected).abs().max()
    _, entropy = logprobs_and_entropy(logits, torch.zeros(8, dtype=torch.long))
    assert (entropy - expected).abs().max() <= 4 * own_error + 4 * torch.finfo(torch.float32).eps
    assert 0.1 < expected.min() < expected.max() < 0.5


def test_logprobs_of_improbable_tokens_do_not_vanish():
    logits = torch.tensor([[0.0, -500.0, 3.0], [0.0, -90.0, 0.0], [0.0, 1e4, 5.0]], requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([1, 1, 0]))
    expected = logits.detach().double().log_softmax(-1)
    assert torch.allclose(logprobs.double(), expected[torch.arange(3), torch.tensor([1, 1, 0])])
    assert torch.allclose(entropy.double(), -(expected.exp() * expected).nan_to_num().sum(-1), atol=1e-3)
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_the_entropys_gradient_alone_and_with_that_of_the_logprobs():
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 50) * 3, torch.randint(0, 50, (7,))
    logits[0, 3] = -200.0  # its probability is 0 in fp32
    of_logprobs, of_entropy = torch.randn(7), torch.randn(7)
    for share in (0.0, 1.0):
        ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        logprobs, entropy = logprobs_and_entropy(ours, targets)
        loss = (entropy * of_entropy).sum()
        log_p = exact.log_softmax(-1)
        expected = -((log_p.exp() * log_p).sum(-1) * of_entropy).sum()
        if share:
            loss = loss + (logprobs * of_logprobs).sum()
            expected = expected + (log_p[torch.arange(7), targets] * of_logprobs).sum()
        loss.backward()
        expected.backward()
        assert torch.allclose(ours.grad.double(), exact.grad, atol=1e-5)


def test_a_vocabulary_of_which_not_even_one_row_stays_in_a_cache():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, _CACHED_ELEMENTS + 1), torch.tensor([0, _CACHED_ELEMENTS])
    logprobs, entropy = logprobs_and_entropy(logits, targets)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(logprobs.double(), exact[torch.arange(2), targets], atol=1e-5)
    assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-5)
