"""Random shapes of every architecture against transformers: twenty seeds each."""

import numpy as np
import pytest
import torch

from rl.batching import pack, supervised_sample
from rl.models.hf_engine import HFEngine
from rl.models.titan import TitanEngine
from tests.models.test_hf import in_fp32_and_fp64
from tests.numeric import assert_close_as
from tests.tiny import write_model

SEEDS = 20
TITAN = ("qwen3", "llama", "qwen3_moe")
OTHERS = (
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "granite",
    "cohere",
    "phimoe",
    "falcon",
    "mamba",
)


def random_shape(model_type: str, rng: np.random.Generator) -> dict:
    kv_heads = int(rng.integers(1, 5))
    heads = kv_heads * int(rng.integers(1, 4))
    head_dim = 2 * int(rng.integers(4, 33))
    shape = {
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * head_dim if rng.random() < 0.5 else 8 * int(rng.integers(2, 20)),
        "intermediate_size": int(rng.integers(8, 300)),
        "vocab_size": int(rng.integers(40, 400)),
        "rope_theta": float(10 ** rng.uniform(3, 6)),
        "rms_norm_eps": float(10 ** rng.uniform(-7, -4)),
        "tie_word_embeddings": bool(rng.random() < 0.5),
    }
    experts = int(rng.integers(2, 7))
    if model_type in ("qwen3_moe", "mixtral", "phimoe", "gpt_oss"):  # grouped matmuls want rows of 16 bytes
        shape |= {
            "head_dim": 16,
            "hidden_size": 16 * heads,
            "intermediate_size": 8 * int(rng.integers(1, 30)),
        }
    elif model_type not in ("qwen3", "mamba"):  # transformers derives or checks head_dim
        shape |= {"hidden_size": heads * head_dim}
    if model_type == "falcon":
        shape |= {"new_decoder_architecture": True, "num_kv_heads": kv_heads}
    if model_type == "mamba":
        shape |= {"state_size": int(rng.integers(2, 17))}
    if model_type == "qwen3_moe":
        shape |= {"num_experts": experts, "num_experts_per_tok": int(rng.integers(1, experts + 1))}
        shape |= {
            "moe_intermediate_size": 8 * int(rng.integers(1, 13)),
            "norm_topk_prob": bool(rng.random() < 0.5),
        }
    elif model_type in ("mixtral", "phimoe", "gpt_oss"):
        shape |= {
            "num_local_experts": experts,
            "num_experts_per_tok": int(rng.integers(1, min(experts, 2) + 1)),
        }
    if model_type in ("mistral", "gemma2", "gemma3_text", "gpt_oss"):
        shape |= {"sliding_window": int(rng.integers(4, 60))}
    return shape


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*TITAN, *OTHERS])
def test_logits_equal_transformers_whatever_the_shape(model_type, tmp_path):
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        shape = random_shape(model_type, rng)
        reference = write_model(tmp_path / str(seed), model_type, **shape)
        reference.set_attn_implementation("eager")  # its others leave soft caps out
        rows = [rng.integers(0, shape["vocab_size"], n) for n in rng.integers(2, 90, 3)]
        batch = pack([supervised_sample(row[:1], row[1:]) for row in rows])
        in_fp32, exact = in_fp32_and_fp64(reference, rows)
        for kind in (TitanEngine, HFEngine) if model_type in TITAN else (HFEngine,):
            (logits,) = kind(tmp_path / str(seed)).logits(batch)
            ids = torch.from_numpy(batch.ranks[0][0].sample_ids)
            ours = [logits[ids == i] for i in range(len(rows))]
            assert_close_as(in_fp32, ours, exact, (seed, kind.__name__, shape))
