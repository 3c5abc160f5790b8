"""What a step measures, against transformers in float64: entropy, the loss, and the gap to the generator."""

import numpy as np
import pytest
import torch

from rl.batching import pack, segments_sample
from rl.loss.clip import Clip
from rl.models.hf_engine import HFEngine
from rl.models.loss_metrics import LossMetrics
from rl.models.titan import TitanEngine
from rl.observability.metrics import learning_metrics
from rl.types import Segment
from tests.tiny import write_model

# holds: meaning, fp32's rounding of a mean over 60 tokens is 1e-6, and a token left out moves it by 1e-2

TOLERANCE = 1e-4


@pytest.mark.parametrize("engine", [TitanEngine, HFEngine])
def test_entropy_and_gap_are_those_of_transformers_logits(tmp_path, engine):
    reference = write_model(tmp_path).double()
    rng = np.random.default_rng(0)
    samples, entropies, gaps, outside = [], [], [], []
    for length in (20, 3, 37):
        tokens = rng.integers(0, 128, 5 + length)
        with torch.no_grad():
            logps = reference(torch.from_numpy(tokens)[None]).logits[0, 4:-1].log_softmax(-1)
        exact = logps.gather(1, torch.from_numpy(tokens[5:])[:, None])[:, 0].numpy()
        off = rng.normal(0, 0.2, length)
        samples.append(
            segments_sample(
                [
                    Segment(tokens[:5].tolist(), False, [0.0] * 5),
                    Segment(tokens[5:].tolist(), True, (exact - off).tolist()),
                ],
                advantages=1.0,
            )
        )
        entropies += (-(logps.exp() * logps).sum(-1)).tolist()
        gaps += np.abs(off).tolist()
        outside += (np.abs(np.exp(off) - 1) > 0.1).tolist()
    made = engine(tmp_path)
    batch = pack(samples, **made.packing)
    update = made.forward_backward(batch, Clip()) | {"denominator": 60.0, "grad_norm": 1.0}
    update |= {"computed:sum": 0.0, "unshared:sum": 0.0, "cuts:sum": 0.0}
    metrics = learning_metrics([update], sampled=True)
    assert len(entropies) == 60
    assert metrics["entropy"] == pytest.approx(np.mean(entropies), abs=TOLERANCE)
    assert metrics["logprob_diff/mean"] == pytest.approx(np.mean(gaps), abs=TOLERANCE)
    assert metrics["logprob_diff/max"] == pytest.approx(np.max(gaps), abs=TOLERANCE)
    assert metrics["logprob_diff/ratio_outside"] == pytest.approx(np.mean(outside), abs=TOLERANCE)


def test_sums_of_micro_batches_add_up_and_the_largest_of_all_stays():
    metrics = LossMetrics(torch.device("cpu"))
    for loss, gap in ((1.0, 3.0), (2.0, 5.0), (4.0, 0.5)):
        metrics.add({"loss:sum": torch.tensor(loss), "logprob_diff:max": gap, "tokens:sum": 2})
    assert metrics.totals() == {"loss:sum": 7.0, "logprob_diff:max": 5.0, "tokens:sum": 6.0}
