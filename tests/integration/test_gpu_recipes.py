"""The recipes for GPUs, each with a tiny model of its architecture and data of its form, on the devices that are there."""

# holds: meaning, a missed weight sync moves the mean by over 3e-2

import json

import pyarrow
import pytest
from pyarrow import parquet

from rl.models.sources import write_character_tokenizer
from tests.devices import needs
from tests.integration.runs import read_metrics, rl
from tests.tiny import write_model

pytestmark = [pytest.mark.slow, needs(2)]
ALPHABET = "".join(map(chr, range(32, 127)))
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
LLAMA_ROPE = {
    "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "tiny_qwen3_0_6b": ("qwen3", {}),
    "tiny_qwen3_1_7b": ("qwen3", {}),
    "tiny_llama_3_1_8b_lora": ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA_ROPE}),
    "tiny_qwen3_30b_a3b_lora": ("qwen3_moe", {"tie_word_embeddings": False, **MOE}),
}


@pytest.mark.parametrize("recipe", MODELS)
def test_a_recipe_for_gpus_takes_two_steps(tmp_path, recipe):
    kind, changes = MODELS[recipe]
    write_model(tmp_path / "model", kind, **changes)
    write_character_tokenizer(ALPHABET, tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(30)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    given = (
        "--model.path",
        tmp_path / "model",
        "--env.path",
        tmp_path / "train.parquet",
        "--run_dir",
        tmp_path / "run",
    )
    done = rl("train", f"tests/recipes.py:{recipe}", *given)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert all(m["logprob_diff/mean"] < 0.1 and m["tokens/trained"] > 0 for m in metrics[1:])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["recipe"].endswith(recipe)
