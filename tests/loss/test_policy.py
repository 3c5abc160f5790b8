"""Each loss against an implementation that shares no code with it.

That is plain Python in float64, sequence by sequence and token by token from the paper's formula, with the
gradient worked out by hand. Random inputs have rows of all lengths, extreme ratios, zero weights and zero
advantages; and there are numbers worked by hand.
"""

# holds: exact

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rl.errors import RunError
from rl.loss.base import TokenInputs
from rl.loss.cispo import CISPO
from rl.loss.clip import Clip
from rl.loss.cross_entropy import CrossEntropy
from rl.loss.distillation import Distillation
from rl.loss.dpo import DPO
from rl.loss.dro import DRO
from rl.loss.gspo import GSPO
from rl.loss.importance_sampling import ImportanceSampling
from rl.loss.logprobs import logprobs_and_entropy
from rl.loss.value import ClippedValue


@dataclass
class Row:
    """One sequence: lists of floats, one for each token."""

    new: list[float]
    old: list[float]
    advantages: list[float]
    weights: list[float]
    ref: list[float]
    returns: list[float]

    def __len__(self) -> int:
        return len(self.new)


def random_rows(rng, num, equal_advantages=False):
    """Lengths from 0; ratios from e^-40 to e^40; some weights and advantages are 0."""
    rows = []
    for _ in range(num):
        n = int(rng.integers(0, 9))
        spread = rng.choice([0.01, 1.0, 15.0])
        old = rng.normal(-2, 1, n)
        new = old + rng.normal(0, spread, n)
        advantages = np.full(n, rng.normal()) if equal_advantages else rng.normal(0, 2, n)
        advantages *= rng.random() > 0.2
        weights = rng.uniform(0, 1, n) * (rng.random(n) > 0.2)
        reference, returns = old + rng.normal(0, 1, n), rng.normal(0, 1, n)
        rows.append(Row(*(a.tolist() for a in (new, old, advantages, weights, reference, returns))))
    return rows


def run(loss, rows):
    """(value, gradient, metrics); the rows' tokens mix sequences no more than packing does."""

    def flat(name):
        return torch.tensor([v for row in rows for v in getattr(row, name)], dtype=torch.float64)

    ids = torch.tensor([i for i, row in enumerate(rows) for _ in range(len(row))], dtype=torch.int64)
    logprobs = flat("new").requires_grad_()
    columns = {"ref_logprobs": flat("ref"), "values": flat("old"), "returns": flat("returns")}
    output = loss(logprobs, TokenInputs(flat("old"), flat("advantages"), flat("weights"), ids, columns))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output.loss.item(), gradient.tolist(), output.metrics


def cut(x):
    """Log-ratios are cut at 20 nats: (value, whether a gradient flows)."""
    return max(-20.0, min(20.0, x)), float(-20.0 <= x <= 20.0)


# Each reference: a row -> (loss, gradient of each token)


def clip(low, high, dual=0.0):
    def reference(row):
        total, gradient = 0.0, []
        for new, old, a, w in zip(row.new, row.old, row.advantages, row.weights, strict=True):
            x, flows = cut(new - old)
            ratio = math.exp(x)
            if a > 0:
                term, slope = (ratio * a, ratio * a) if ratio <= 1 + high else ((1 + high) * a, 0.0)
            elif a < 0:
                term, slope = (ratio * a, ratio * a) if ratio >= 1 - low else ((1 - low) * a, 0.0)
                if dual and term < dual * a:
                    term, slope = dual * a, 0.0
            else:
                term, slope = 0.0, 0.0
            total -= w * term
            gradient.append(-w * slope * flows)
        return total, gradient

    return reference


def gspo(low, high, level):
    def reference(row):
        n = len(row)
        if n == 0:
            return 0.0, []
        x, flows = cut(sum(a - b for a, b in zip(row.new, row.old, strict=True)) / n)
        s = math.exp(x)
        total, gradient, through_s = 0.0, [], 0.0
        for a, w in zip(row.advantages, row.weights, strict=True):
            held = (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low) or a == 0
            total -= w * a * ((1 + high if a > 0 else 1 - low) if held else s)
            own = 0.0 if held else -w * a * s
            gradient.append(own)
            through_s += own * flows
        return total, gradient if level == "token" else [through_s / n] * n

    return reference


def cispo(low, high):
    def reference(row):
        total, gradient = 0.0, []
        for new, old, a, w in zip(row.new, row.old, row.advantages, row.weights, strict=True):
            weight = min(max(math.exp(cut(new - old)[0]), 1 - low), 1 + high)
            total -= w * weight * a * new
            gradient.append(-w * weight * a)
        return total, gradient

    return reference


def importance_sampling(row):
    total, gradient = 0.0, []
    for new, old, a, w in zip(row.new, row.old, row.advantages, row.weights, strict=True):
        x, flows = cut(new - old)
        total -= w * math.exp(x) * a
        gradient.append(-w * math.exp(x) * a * flows)
    return total, gradient


def dro(beta):
    def reference(row):
        terms = zip(row.new, row.old, row.advantages, row.weights, strict=True)
        pairs = [(-w * (n * a - beta / 2 * (n - o) ** 2), -w * (a - beta * (n - o))) for n, o, a, w in terms]
        return sum(p[0] for p in pairs), [p[1] for p in pairs]

    return reference


def distillation(row):
    total, gradient = 0.0, []
    for new, old, ref, w in zip(row.new, row.old, row.ref, row.weights, strict=True):
        x, flows = cut(new - old)
        total -= w * math.exp(x) * (ref - old)
        gradient.append(-w * math.exp(x) * (ref - old) * flows)
    return total, gradient


def cross_entropy(row):
    return -sum(w * n for w, n in zip(row.weights, row.new, strict=True)), [-w for w in row.weights]


def value(clip):
    """Here `new` are the values, and `old` those before."""

    def reference(row):
        total, gradient = 0.0, []
        for v, old, target, w in zip(row.new, row.old, row.returns, row.weights, strict=True):
            plain, slope = (v - target) ** 2 / 2, v - target
            if clip:
                near = old + max(-clip, min(clip, v - old))
                if (near - target) ** 2 / 2 > plain:
                    plain, slope = (near - target) ** 2 / 2, 0.0  # it is worse only where it was cut
            total += w * plain
            gradient.append(w * slope)
        return total, gradient

    return reference


CASES = {
    "PPO": (Clip(0.2, 0.2), clip(0.2, 0.2)),
    "clip-higher": (Clip(0.15, 0.4), clip(0.15, 0.4)),
    "dual clip": (Clip(0.2, 0.28, dual=3.0), clip(0.2, 0.28, 3.0)),
    "GSPO": (GSPO(3e-4, 4e-4), gspo(3e-4, 4e-4, "sequence")),
    "GSPO, wide": (GSPO(0.5, 2.0), gspo(0.5, 2.0, "sequence")),
    "GSPO-token": (GSPO(0.5, 2.0, level="token"), gspo(0.5, 2.0, "token")),
    "CISPO": (CISPO(), cispo(1.0, 4.0)),
    "CISPO, two bounds": (CISPO(low=0.3, high=0.5), cispo(0.3, 0.5)),
    "importance sampling": (ImportanceSampling(), importance_sampling),
    "DRO": (DRO(beta=0.3), dro(0.3)),
    "distillation": (Distillation(), distillation),
    "cross entropy": (CrossEntropy(), cross_entropy),
    "value": (ClippedValue(0.0), value(0.0)),
    "clipped value": (ClippedValue(0.2), value(0.2)),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_equals_an_independent_implementation_in_value_and_gradient(name):
    loss, reference = CASES[name]
    rng = np.random.default_rng(0)
    for _ in range(60):
        rows = random_rows(rng, int(rng.integers(0, 7)), equal_advantages=bool(rng.random() < 0.5))
        total, gradient, _ = run(loss, rows)
        expected = [reference(row) for row in rows]
        assert total == pytest.approx(sum(e[0] for e in expected), rel=1e-6, abs=1e-6)
        assert gradient == pytest.approx([g for e in expected for g in e[1]], rel=1e-6, abs=1e-6)


def test_cross_entropy_takes_weights_of_either_sign():
    row = Row([-1.0, -2.0, -3.0], [0.0] * 3, [0.0] * 3, [1.0, -0.5, 0.0], [0.0] * 3, [0.0] * 3)
    total, gradient, _ = run(CrossEntropy(), [row])
    assert (total, gradient) == (0.0, [-1.0, 0.5, 0.0])  # 1 * 1 - 0.5 * 2


@pytest.mark.parametrize(("smoothing", "nll"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.7)])
def test_dpo_equals_an_independent_implementation_in_value_and_gradient(smoothing, nll):
    rng, beta = np.random.default_rng(1), 0.3
    for _ in range(60):
        rows = [row for row in random_rows(rng, 12) if len(row)]
        rows = rows[: len(rows) // 2 * 2]
        total, gradient, metrics = run(DPO(beta, smoothing, nll), rows)
        expected, expected_gradient, preferred = 0.0, [], 0
        for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
            log_ratios = [
                sum(w * (n - r) for w, n, r in zip(row.weights, row.new, row.ref, strict=True))
                for row in (chosen, rejected)
            ]
            margin = beta * (log_ratios[0] - log_ratios[1])
            sigmoid = 1 / (1 + math.exp(-margin)) if margin > -700 else 0.0
            log_sigmoid = -math.log1p(math.exp(-margin)) if margin > -30 else margin
            log_other = -math.log1p(math.exp(margin)) if margin < 30 else -margin
            expected -= (1 - smoothing) * log_sigmoid + smoothing * log_other
            slope = -(1 - smoothing) * (1 - sigmoid) + smoothing * sigmoid
            expected -= nll * sum(chosen.new) / len(chosen)
            expected_gradient += [slope * beta * w - nll / len(chosen) for w in chosen.weights]
            expected_gradient += [-slope * beta * w for w in rejected.weights]
            preferred += margin > 0
        assert total == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert gradient == pytest.approx(expected_gradient, rel=1e-6, abs=1e-6)
        assert (int(metrics["dpo/pairs:sum"]), int(metrics["dpo/accuracy:sum"])) == (
            len(rows) // 2,
            preferred,
        )


def test_dpo_refuses_sequences_that_are_not_side_by_side():
    from rl.errors import RunError

    one = Row([-1.0], [-1.0], [0.0], [1.0], [-1.0], [0.0])
    with pytest.raises(RunError, match="pack pairs with samples_per_unit=2"):
        run(DPO(), [one])


def test_a_loss_that_reads_what_the_samples_do_not_carry_says_so():
    from rl.errors import RunError

    inputs = TokenInputs(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.long))
    with pytest.raises(RunError, match="the loss reads 'ref_logprobs', which the samples do not carry"):
        Distillation()(torch.zeros(1), inputs)


def test_clip_worked_by_hand():
    # ratios 1, 1.5, 1.5, 0.5, 0.5 with advantages 1, 1, -1, 1, -1 and bounds [0.8, 1.28]:
    # min terms: 1, 1.28 (clipped), -1.5, 0.5, -0.8 (clipped); their sum is 0.48.
    new = [0.0, math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)]
    row = Row(new, [0.0] * 5, [1.0, 1.0, -1.0, 1.0, -1.0], [1.0] * 5, [0.0] * 5, [0.0] * 5)
    total, gradient, metrics = run(Clip(low=0.2, high=0.28), [row])
    assert total == pytest.approx(-0.48)
    # d/dlogp of ratio * A is ratio * A where it is not clipped, and 0 where it is.
    assert gradient == pytest.approx([-1.0, 0.0, 1.5, -0.5, 0.0])
    assert metrics["clip_fraction:sum"] == 2


def test_gspo_worked_by_hand():
    # Two tokens with log-ratios log 4 and 0: s = exp(log(4) / 2) = 2. Advantage 1, bound 1 + 0.5: clipped,
    # no gradient.
    # Advantage -1: -s, and d s / d logp = s / 2 for each token; the loss is the sum over both tokens, 2 s.
    old = [0.0, 0.0]
    row = lambda a: Row([math.log(4), 0.0], old, [a, a], [1.0, 1.0], old, old)  # noqa: E731
    total, gradient, _ = run(GSPO(0.5, 0.5), [row(1.0)])
    assert total == pytest.approx(-3.0) and gradient == [0.0, 0.0]
    total, gradient, _ = run(GSPO(0.5, 0.5), [row(-1.0)])
    assert total == pytest.approx(4.0) and gradient == pytest.approx([2.0, 2.0])


def test_the_grpo_gradient_of_a_softmax_policy_worked_by_hand():
    # Two actions with equal logits; action 0 was taken with advantage 2 and a ratio of 1.
    # d(-A logp_0)/dlogits = -A (onehot - softmax) = -2 * (0.5, -0.5)
    logits = torch.zeros(1, 2, dtype=torch.float32, requires_grad=True)
    logprobs = logprobs_and_entropy(logits, torch.tensor([0]))[0]
    inputs = TokenInputs(logprobs.detach(), torch.tensor([2.0]), torch.ones(1), torch.zeros(1))
    Clip()(logprobs, inputs).loss.backward()
    assert logits.grad.tolist() == [[-1.0, 1.0]]


def test_distillation_has_the_gradient_of_the_reverse_kl():
    # Of one next token: the mean over the student's samples is the gradient of KL(student || teacher) for
    # its logits.
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64).log_softmax(0)
    exact = logits.clone().requires_grad_()
    student = exact.log_softmax(0)
    (student.exp() * (student - teacher)).sum().backward()
    sampled = logits.clone().requires_grad_()
    logprobs = sampled.log_softmax(0)
    everything = TokenInputs(
        logprobs.detach(),
        torch.zeros(5),
        logprobs.detach().exp(),
        torch.zeros(5, dtype=torch.long),
        {"ref_logprobs": teacher},
    )
    Distillation()(logprobs, everything).loss.backward()  # every token, weighted by its probability
    assert torch.allclose(sampled.grad, exact.grad, atol=1e-12)


def test_the_dual_clip_counts_the_tokens_that_it_bounds_and_no_others():
    """Ratios of 10: of an advantage of -1 it bounds the term at -3; of 1 the ratio is clipped; 1.1 is neither."""
    ratios, advantages = torch.tensor([10.0, 10.0, 1.1, 1.1]), torch.tensor([-1.0, 1.0, -1.0, 1.0])
    ids = torch.arange(4)
    inputs = TokenInputs(torch.zeros(4), advantages, torch.ones(4), ids)
    output = Clip(dual=3.0)(ratios.log(), inputs)
    assert output.metrics["dual_clip_fraction:sum"] == 1
    assert output.loss.item() == pytest.approx(3.0 - 1.28 + 1.1 - 1.1)


def test_a_batch_without_tokens_has_every_loss_input_empty():
    """A rank may have none; others have, of a name that it does not know."""
    nothing = torch.zeros(0)
    assert TokenInputs(nothing, nothing, nothing, nothing.long()).loss_input("ref_logprobs").shape == (0,)
    one = torch.zeros(1)
    with pytest.raises(RunError, match="'ref_logprobs', which the samples do not carry"):
        TokenInputs(one, one, one, one.long()).loss_input("ref_logprobs")


def test_a_chosen_response_that_the_policy_cannot_write_has_an_infinite_loss():
    """NaN, as 0 times infinity, would not say so."""
    logprobs = torch.tensor([-math.inf, -1.0])
    ones, ids = torch.ones(2), torch.tensor([0, 1])
    inputs = TokenInputs(logprobs, ones, ones, ids, {"ref_logprobs": torch.tensor([-1.0, -1.0])})
    assert DPO()(logprobs, inputs).loss.item() == math.inf
