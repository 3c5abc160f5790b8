"""Logprobs and entropy from logits, against float64."""

import torch

from rl.loss.logprobs import logprobs_and_entropy


def test_logprobs_and_entropy_are_fp32_whatever_the_logits():
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
    assert logprobs.requires_grad and not entropy.requires_grad
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    # bf16 logits get a bf16 gradient.
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


def test_logprobs_of_improbable_tokens_do_not_vanish():
    logits = torch.tensor([[0.0, -500.0, 3.0], [0.0, -90.0, 0.0], [0.0, 1e4, 5.0]], requires_grad=True)
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([1, 1, 0]))
    expected = logits.detach().double().log_softmax(-1)
    assert torch.allclose(logprobs.double(), expected[torch.arange(3), torch.tensor([1, 1, 0])])
    assert torch.allclose(entropy.double(), -(expected.exp() * expected).nan_to_num().sum(-1), atol=1e-3)
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()
