"""Hugging Face directories in and out: logits equal transformers', weights survive the round trip."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl.batching import pack, supervised_sample
from rl.errors import ConfigError, RunError
from rl.loss.cross_entropy import CrossEntropy
from rl.models import hf, hf_checks
from rl.models.build import ENGINES
from rl.models.engine_config import EngineConfig
from rl.models.hf_engine import HFEngine
from rl.models.titan import TitanEngine
from rl.types import OptimParams
from tests.numeric import assert_close_as
from tests.tiny import write_config, write_model

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
SMOLLM2_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "head_dim": 64}
TWO_KINDS = ["sliding_attention", "full_attention"]
MODELS = {
    "qwen3 tied": ("qwen3", {}),
    "qwen3 untied": ("qwen3", {"tie_word_embeddings": False}),
    "llama tied": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama 3.1 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3 moe": ("qwen3_moe", MOE),
    "qwen3 moe, routing not normalized": (
        "qwen3_moe",
        MOE | {"norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "smollm2 heads": ("llama", SMOLLM2_HEADS),
}


# What HFEngine has to find out by itself: sliding windows, scaled and soft-capped logits, and layers that
# cannot be packed.
OTHERS = {
    "mistral": ("mistral", {"sliding_window": 16}, True),
    "gemma3": ("gemma3_text", {"sliding_window": 16, "layer_types": TWO_KINDS}, True),
    "gemma2": ("gemma2", {"sliding_window": 16}, False),
    "granite": ("granite", {"logits_scaling": 4.0}, True),
    "cohere": ("cohere", {"logit_scale": 0.25}, True),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "sliding_window": 16}, False),
    "falcon, without transformers' attention interface": ("falcon", {}, False),
    "mamba, state space": ("mamba", {"state_size": 8}, False),
    "phimoe, windows only in its mask": ("phimoe", {"num_local_experts": 4, "sliding_window": 45}, False),
    "mixtral": ("mixtral", {"num_local_experts": 4}, True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_hf_engine_computes_what_transformers_computes(tmp_path, name):
    model_type, changes, packed = OTHERS[name]
    reference = write_model(tmp_path / "in", model_type, **changes)
    reference.set_attn_implementation("eager")  # its others leave soft caps out
    engine = HFEngine(tmp_path / "in")
    assert engine._model.packed == packed
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 128, n) for n in (60, 3, 37, 2)]
    batch = pack([supervised_sample(row[:1], row[1:]) for row in rows])
    (logits,) = engine.logits(batch)
    ids = torch.from_numpy(batch.ranks[0][0].sample_ids)
    in_fp32, exact = in_fp32_and_fp64(reference, rows)
    assert_close_as(in_fp32, [logits[ids == i] for i in range(len(rows))], exact)
    with pytest.raises(ConfigError, match="is the model that this engine reads; give another directory"):
        engine.save_hf(tmp_path / "out/../in")
    engine.save_hf(tmp_path / "out")
    again = type(reference).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), again.parameters(), strict=True))
    # What is published is what the directory holds, experts that transformers stacks among it.
    on_disk = load_file(tmp_path / "in/model.safetensors")
    published = {shard.name: shard.data for shard in engine.export()}
    assert published.keys() == on_disk.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in on_disk.items())


LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2}


@pytest.mark.parametrize(("model_type", "changes"), [("mamba", {"state_size": 8}), ("llama4_text", LLAMA4)])
def test_architectures_whose_layers_mix_dtypes_compute_in_bf16(tmp_path, model_type, changes):
    reference = write_model(tmp_path, model_type, **changes)
    engine = HFEngine(tmp_path, EngineConfig(dtype="bfloat16"))
    row = np.random.default_rng(0).integers(0, 128, 20)
    batch = pack([supervised_sample(row[:1], row[1:])])

    def logprobs(model):
        return logits_of(model, row).float().log_softmax(-1)[torch.arange(19), torch.from_numpy(row[1:])]

    exact = logprobs(reference)  # in fp32: a thousand times nearer than bf16
    in_bf16 = logprobs(reference.bfloat16())
    assert_close_as(in_bf16, engine.forward(batch)[0], exact, mean=True)
    engine.forward_backward(batch, CrossEntropy())
    # holds: meaning, a gradient of bf16 is finite and of the size of fp32's
    assert 0 < engine.optim_step(OptimParams(lr=1e-3))["grad_norm"] < 1e3


def test_an_architecture_that_does_not_compute_in_the_dtype_is_refused_when_it_is_built(
    tmp_path, monkeypatch
):
    from rl.models.hf_model import HFModel

    write_model(tmp_path, "mamba", state_size=8)
    monkeypatch.setattr(HFModel, "_logits", lambda self, h: self.lm.get_output_embeddings()(h))  # no cast
    HFEngine(tmp_path)
    with pytest.raises(
        ConfigError, match="MambaForCausalLM does not compute in bfloat16 .*set dtype to float32"
    ):
        HFEngine(tmp_path, EngineConfig(dtype="bfloat16"))


def test_hf_engine_refuses_what_it_cannot_compute(tmp_path, monkeypatch):
    from rl.models import hf_model

    write_model(tmp_path, "gemma2")
    monkeypatch.setattr(hf_model, "_after_head", lambda config: lambda logits: logits)
    message = "does not compute what transformers computes for Gemma2ForCausalLM: logits differ"
    with pytest.raises(ConfigError, match=message):
        HFEngine(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_in_fp32(tmp_path, name):
    """As near to transformers in fp64 as transformers' own fp32 is on this machine, with a margin of four."""
    reference = write_model(tmp_path, MODELS[name][0], **MODELS[name][1])
    engine = TitanEngine(tmp_path)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 128, n) for n in (200, 3, 37, 2)]
    # Packed: the rows must not see each other.
    batch = pack([supervised_sample(row[:1], row[1:]) for row in rows])
    (logits,) = engine.logits(batch)
    (micro,) = batch.ranks[0]
    ours = [logits[torch.from_numpy(micro.sample_ids == i)] for i in range(len(rows))]
    in_fp32 = [logits_of(reference, row) for row in rows]
    reference.set_experts_implementation("eager")  # the other implementations lack fp64
    exact = [logits_of(reference.double(), row) for row in rows]

    def logprobs(logits):
        targets = [torch.from_numpy(row[1:])[:, None] for row in rows]
        return [of.log_softmax(-1).gather(1, at)[:, 0] for of, at in zip(logits, targets, strict=True)]

    values = engine.forward(batch)
    our_logprobs = [torch.from_numpy(values[i]) for i in range(len(rows))]
    one_ulp = torch.finfo(torch.float32).eps * max(row.abs().max().item() for row in exact)
    for got, expected, in_fp64 in (
        (ours, in_fp32, exact),
        (our_logprobs, logprobs(in_fp32), logprobs(exact)),
    ):
        own_error = largest_error(expected, in_fp64)
        # holds: meaning, in float64 the reference is still the same model
        assert own_error < 1e4 * one_ulp  # in fp64 the reference is still the same model
        assert largest_error(got, in_fp64) < 4 * max(own_error, one_ulp)


@torch.no_grad()
def logits_of(model, row):
    return model(torch.from_numpy(row)[None]).logits[0, :-1]


def in_fp32_and_fp64(model, rows):
    """Logits of each row; afterwards the model computes in fp64."""
    in_fp32 = [logits_of(model, row) for row in rows]
    model.set_experts_implementation("eager")  # the other implementations lack fp64
    return in_fp32, [logits_of(model.double(), row) for row in rows]


def largest_error(found, expected):
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "qwen3_moe"])
def test_an_exported_directory_loads_in_transformers_with_the_same_weights(tmp_path, model_type):
    import transformers

    write_model(tmp_path / "in", model_type)
    engine = TitanEngine(tmp_path / "in")
    row = list(range(5, 40))
    batch = pack([supervised_sample(row[:1], row[1:])])
    engine.forward_backward(batch, CrossEntropy())
    engine.optim_step(OptimParams(lr=1e-2))
    engine.save_hf(tmp_path / "out")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    in_fp32, exact = in_fp32_and_fp64(reference, [np.array(row)])
    assert_close_as(in_fp32, engine.logits(batch), exact)
    # A second engine reads what the first wrote, bit for bit.
    again = TitanEngine(tmp_path / "out")
    assert torch.equal(again.logits(batch)[0], engine.logits(batch)[0])


def test_an_export_takes_the_place_of_one_of_more_files(tmp_path, monkeypatch):
    """Whose names sort behind its own."""
    import transformers

    write_model(tmp_path / "in")
    engine, out = TitanEngine(tmp_path / "in"), tmp_path / "out"
    for shard_bytes, doubled in ((50_000, False), (100_000, True), (1 << 30, False)):
        monkeypatch.setattr(hf, "_SHARD_BYTES", shard_bytes)
        for parameter in engine._model.parameters():
            parameter.data.mul_(2.0 if doubled else 1.0)
        engine.save_hf(out)
        hf.check_weights(out)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
        read = hf.HFWeights(out)
        for shard in engine.export():
            assert torch.equal(read(shard.name), shard.data) and torch.equal(theirs[shard.name], shard.data)
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


def test_weights_that_the_index_does_not_name_are_not_read(tmp_path):
    """As the second format that some directories have."""
    from safetensors.torch import save_file

    write_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor * 0 for name, tensor in tensors.items()}, tmp_path / "original.safetensors")
    name = "model.embed_tokens.weight"
    assert torch.equal(hf.HFWeights(tmp_path)(name), tensors[name])
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    hf.check_weights(tmp_path)
    assert torch.equal(hf.HFWeights(tmp_path)(name), tensors[name])


def test_settings_for_sampling_that_transformers_would_not_write_stay_as_they_are(tmp_path):
    write_model(tmp_path / "in")
    settings = {"temperature": 0.9, "top_p": 0.6}
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(settings))
    HFEngine(tmp_path / "in").save_hf(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings


@pytest.mark.parametrize("engine", [TitanEngine, HFEngine])
def test_quantized_weights_are_refused(tmp_path, engine):
    """They would be quantized again in each version."""
    write_model(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(
        ConfigError, match="has a quantization_config, which is not supported; use the model's"
    ):
        engine(tmp_path)


def test_what_is_missing_broken_or_unsupported_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config.json"):
        hf.read_config(tmp_path)
    write_config(tmp_path)
    with pytest.raises(ConfigError, match=r"has no \*.safetensors weights"):
        hf.check_weights(tmp_path)
    write_model(tmp_path)
    hf.check_weights(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model.safetensors is not a readable safetensors file"):
        hf.check_weights(tmp_path)
    message = "architecture GPT2LMHeadModel is not supported; use one of Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match=message):
        hf_checks.check_supported({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(ConfigError, match="rope_type='yarn'"):
        hf_checks.check_supported({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "yarn"}})


@pytest.mark.parametrize("engine", [TitanEngine, HFEngine])
def test_no_tensor_of_a_directory_is_ignored_or_made_up(tmp_path, engine):
    from safetensors.torch import save_file

    write_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)

    def with_tensors(changed):
        save_file(changed, file, metadata={"format": "pt"})
        return engine(tmp_path)

    head = tensors["model.embed_tokens.weight"].clone()
    with_tensors(tensors | {"lm_head.weight": head})  # a copy of what it is tied to
    with pytest.raises(
        ConfigError, match=r"has a lm_head.weight of its own, but its config.json has tie_word"
    ):
        with_tensors(tensors | {"lm_head.weight": head + 1e-3})
    with pytest.raises(ConfigError, match=r"holds 1 tensors that .* has no place for, such as model.extra"):
        with_tensors(tensors | {"model.extra.weight": head.clone()})
    missing = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ConfigError, match=f"tensor.*{missing}"):
        with_tensors({name: tensor for name, tensor in tensors.items() if name != missing})


def test_rope_that_depends_on_the_batch_is_refused(tmp_path):
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    longrope |= {"original_max_position_embeddings": 128}
    write_config(tmp_path, "llama", rope_scaling=longrope)
    with pytest.raises(
        ConfigError, match="factors change with the longest sequence .* max_seq_len to at most 128"
    ):
        HFEngine(tmp_path, EngineConfig(seed=0))
    HFEngine(tmp_path, EngineConfig(seed=0, max_seq_len=128))
    hf_checks.check_rope_is_fixed({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 10**6)
    with pytest.raises(ConfigError, match="rope_type='dynamic'"):
        hf_checks.check_rope_is_fixed({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 8)
    with pytest.raises(ConfigError, match="rope_type='dynamic'"):
        by_layer = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
        hf_checks.check_rope_is_fixed({"text_config": {"rope_parameters": by_layer}}, 8)


def test_packed_rows_are_chosen_in_fp32_whatever_it_computes_in(tmp_path, capfd):
    write_model(tmp_path / "llama", "llama", num_hidden_layers=12)
    assert HFEngine(tmp_path / "llama", EngineConfig(dtype="bfloat16"))._model.packed
    assert "HFEngine: LlamaForCausalLM computes packed rows" in capfd.readouterr().out
    write_model(tmp_path / "gemma2", "gemma2")
    assert not HFEngine(tmp_path / "gemma2", EngineConfig(dtype="bfloat16"))._model.packed
    assert "Gemma2ForCausalLM computes padded rows (packed rows: its attention uses" in capfd.readouterr().out


def test_dropout_follows_the_runs_seed(tmp_path):
    """And not what the process drew before, which torch seeds anew in each."""
    write_model(tmp_path, "qwen2", attention_dropout=0.5)
    batch = pack([supervised_sample([1], list(range(2, 60)))])

    def losses(before, seed):
        torch.manual_seed(before)
        engine = HFEngine(tmp_path, EngineConfig(dropout=True, dropout_seed=seed))
        return [engine.forward_backward(batch, CrossEntropy())["loss:sum"] for _ in range(2)]

    first, again, other = losses(1, 5), losses(2, 5), losses(1, 6)
    assert first == again
    assert first[0] != first[1] and not set(first) & set(other)


def test_a_models_own_dropout_is_off_unless_asked_for(tmp_path):
    write_model(tmp_path, "qwen2", attention_dropout=0.5)
    batch = pack([supervised_sample([1], list(range(2, 60)))])
    gaps = []
    for dropout in (False, True):
        engine = HFEngine(tmp_path, EngineConfig(dropout=dropout))
        expected = engine.forward(batch)[0].sum()
        gaps.append(abs(engine.forward_backward(batch, CrossEntropy())["loss:sum"] + expected))
    assert gaps[0] < 1e-3 < 0.1 < gaps[1]  # holds: meaning, dropout moves the loss by 1.1, rounding by 2e-5
    with pytest.raises(ConfigError, match="TitanEngine has no dropout"):
        write_model(tmp_path / "qwen3")
        TitanEngine(tmp_path / "qwen3", EngineConfig(dropout=True))


@pytest.mark.parametrize("kind", ENGINES)
def test_weights_of_another_shape_than_the_config_are_refused(tmp_path, kind):
    write_model(tmp_path)
    write_config(tmp_path, intermediate_size=256)
    message = (
        r"gate_proj.weight has shape \(192, 64\) in the weights but \(256, 64\)"
        r"|down_proj.weight has shape \(64, 192\) in the weights but \(64, 256\)"
    )
    with pytest.raises(RunError, match=message):
        ENGINES[kind](tmp_path)


def test_what_is_written_beside_weights_may_be_read_and_changed(tmp_path):
    """Whatever the mode of the model's own files: git-annex and nix keep them to be read alone."""
    write_model(tmp_path / "model")
    for path in (tmp_path / "model").iterdir():
        path.chmod(0o444)
    engine = HFEngine(tmp_path / "model", EngineConfig())
    engine.save_hf(tmp_path / "out")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes and "config.json" in modes
    assert len(set(modes.values())) == 1 and modes["config.json"] & 0o600 == 0o600, modes


def test_a_directory_that_may_not_be_entered_is_named(tmp_path, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match="config.json may not be read; give yourself access"):
        hf.read_config(tmp_path)


def test_an_exports_config_names_the_dtype_of_its_own_weights(tmp_path):
    """And the index of the model's own files does not come along."""
    write_config(tmp_path / "in", dtype="bfloat16")
    for name in ("tokenizer.json", "model.safetensors.index.json"):
        (tmp_path / "in" / name).write_text("{}")
    hf.save_model(tmp_path / "out", tmp_path / "in", [("a", torch.ones(2))], torch.float32)
    assert hf.read_config(tmp_path / "out") == hf.read_config(tmp_path / "in") | {"dtype": "float32"}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert torch.equal(hf.HFWeights(tmp_path / "out")("a"), torch.ones(2))
