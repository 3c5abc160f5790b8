"""transformers' architectures: all of a model's state travels, nothing is random, and what cannot be right is refused."""

# holds: meaning, rounding moves these by 1e-5 at most and a wrong tensor by over 0.1

import copy
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from rl.batching import pack, supervised_sample
from rl.errors import ConfigError
from rl.loss.cross_entropy import CrossEntropy
from rl.models.disk_tensors import convert, disk_tensors
from rl.models.engine_config import EngineConfig
from rl.models.export import named_state
from rl.models.hf_checks import check_expert_width
from rl.models.hf_engine import HFEngine
from rl.models.learner import local
from rl.models.titan import TitanEngine
from rl.types import LoRA
from tests.models.architectures import LIMIT, MODEL_TYPES, audit, audit_engine, logits_of
from tests.models.small_configs import random_model, small_config
from tests.tiny import write_config

# One for each mistake that was once made: buffers of parameters and of routers, dropout and noise under five
# names, windows, attention of its own, shared parameters, tensors that transformers renames, joins and stacks.
SELECTED = (
    *("gemma4_text", "apertus", "deepseek_v3", "minimax_m2", "seed_oss", "phimoe", "gpt_bigcode", "cohere2"),
    *("gpt_neo", "zamba2", "mixtral", "gpt_neox", "hrm_text", "olmo_hybrid"),
)
ROW = np.random.default_rng(1).integers(2, 128, 40)
BATCH = pack([supervised_sample(ROW[:1], ROW[1:])])


@pytest.mark.parametrize("model_type", SELECTED)
def test_an_architecture_is_right(tmp_path, model_type):
    row = audit_engine(model_type, tmp_path)
    assert not row.refused
    assert max(row.logits, row.gradient, row.twice, row.reload) < LIMIT, row


@pytest.mark.slow
def test_a_generator_gets_every_tensor_or_is_refused(tmp_path):
    """Gemma 4 has buffers that vLLM reads; vLLM's gpt-oss does not take weights while it runs."""
    right, refused = audit(tmp_path, ("gemma4_text", "gpt_oss"))
    assert right.outcome == "right" and right.gap < 1e-4, right
    assert re.search("vLLM's GptOssForCausalLM took no weights for 4 of its modules", refused.outcome)


PAGE = Path(__file__).parents[2] / "docs/models.md"
TABLE = dict(re.findall(r"^\| (\w+) \|.*\| (right|refused|ends)\b[^|]*\|$", PAGE.read_text(), re.MULTILINE))
AT_A_TIME = 12  # all of them take ten minutes of a core


def test_the_page_has_every_architecture_once():
    assert len(set(MODEL_TYPES)) == len(MODEL_TYPES) >= 45 and [*TABLE] == [*MODEL_TYPES]
    assert sum(outcome == "right" for outcome in TABLE.values()) >= 45


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(MODEL_TYPES), AT_A_TIME))
def test_every_architecture_is_as_the_page_says_and_none_is_wrong(tmp_path, first):
    rows = audit(tmp_path, MODEL_TYPES[first : first + AT_A_TIME])
    assert len(rows) == min(AT_A_TIME, len(MODEL_TYPES) - first)
    assert {row.model_type: row.outcome.split()[0].rstrip(":") for row in rows} == {
        row.model_type: TABLE[row.model_type] for row in rows
    }


# ---- a module that nobody has seen


class Unknown(nn.Module):
    """Around a layer's MLP: a persistent buffer, and noise in train mode, or always."""

    def __init__(self, inner: nn.Module, always_random: bool):
        super().__init__()
        self.inner, self.always_random = inner, always_random
        self.register_buffer("gain", torch.ones(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x):
        noise = torch.randn_like(x) if self.training or self.always_random else 0.0
        return self.inner(x) * self.gain + 0.1 * noise


class UnknownConfig(transformers.LlamaConfig):
    model_type = "unknown_to_all"
    always_random = False


class UnknownForCausalLM(LlamaForCausalLM):
    config_class = UnknownConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Unknown(layer.mlp, config.always_random)
        self.post_init()


@pytest.fixture(scope="module", autouse=True)
def registered():
    transformers.AutoConfig.register(UnknownConfig.model_type, UnknownConfig)
    transformers.AutoModelForCausalLM.register(UnknownConfig, UnknownForCausalLM)


def unknown_model(path, gain, **changes):
    config = small_config("llama").to_dict() | {"model_type": UnknownConfig.model_type} | changes
    torch.manual_seed(0)
    model = UnknownForCausalLM(UnknownConfig(**config)).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("gain"):
                buffer.fill_(gain)
    model.save_pretrained(path)
    return model


def test_the_buffers_of_an_unknown_module_travel_on_every_way(tmp_path):
    model = unknown_model(tmp_path / "model", 3.0)
    unknown_model(tmp_path / "other", 0.5)
    engine = HFEngine(tmp_path / "model")
    expected = logits_of(model, ROW)

    def agrees(engine):
        return (engine.logits(BATCH)[0] - expected).abs().max() < LIMIT * expected.std()

    assert agrees(engine)
    published = {shard.name: shard.data for shard in engine.export()}
    assert published.keys() == dict(named_state(model)).keys()
    assert published["model.layers.1.mlp.gain"] == 3.0 and not any("scratch" in name for name in published)
    engine.save_hf(tmp_path / "saved")
    assert agrees(HFEngine(tmp_path / "saved"))
    engine.save(tmp_path / "step-1")
    for take in (lambda e: e.load(tmp_path / "step-1"), lambda e: e.load_weights(tmp_path / "saved")):
        later = HFEngine(tmp_path / "other")
        assert not agrees(later)
        take(later)
        assert agrees(later)
    later.suspend(tmp_path)  # its buffers are still those that it publishes
    later.resume()
    assert agrees(later)
    assert all(later._tensors[name] is tensor for name, tensor in named_state(later._model.lm))


def test_buffers_are_published_in_their_own_dtype(tmp_path):
    unknown_model(tmp_path, 1 + 2**-12)  # which bfloat16 does not hold
    try:
        engine = HFEngine(tmp_path, EngineConfig(dtype="bfloat16"))
    except ConfigError as error:
        assert "does not compute in bfloat16" in str(error)
        return
    shards = {shard.name: shard for shard in engine.export()}
    assert shards["model.layers.0.mlp.gain"].dtype == torch.float32
    assert shards["model.norm.weight"].dtype == torch.bfloat16


def test_what_is_random_in_train_mode_alone_is_not_in_a_gradient(tmp_path):
    model = unknown_model(tmp_path, 3.0)
    engine = HFEngine(tmp_path)
    expected = -engine.forward(BATCH)[0].sum()
    losses = [engine.forward_backward(BATCH, CrossEntropy())["loss:sum"] for _ in range(2)]
    assert losses[0] == losses[1] == pytest.approx(expected, rel=1e-5)
    model.train()
    assert (logits_of(model, ROW) - logits_of(model, ROW)).abs().max() > 0.1  # in train mode it is


def test_what_is_always_random_is_refused_when_it_is_built(tmp_path):
    unknown_model(tmp_path, 3.0, always_random=True)
    with pytest.raises(ConfigError, match="UnknownForCausalLM draws random numbers when it computes logits"):
        HFEngine(tmp_path)


# ---- names on disk


def test_converted_tensors_are_what_transformers_saves(tmp_path):
    from safetensors.torch import load_file

    for model_type in ("mixtral", "deepseek_v3", "jamba", "hrm_text", "gpt_neox"):
        model = random_model(model_type)
        model.save_pretrained(tmp_path / model_type)
        saved = load_file(tmp_path / model_type / "model.safetensors")
        tensors = dict(named_state(model))
        plan = disk_tensors(model, tensors)
        on_disk = {name: tensors[own] for own, name in plan.renamed.items()}
        for names in plan.converted:
            on_disk |= convert(model, {name: tensors[name] for name in names})
        assert on_disk.keys() == saved.keys() == plan.names
        assert all(torch.equal(on_disk[name], tensor) for name, tensor in saved.items())
        assert plan.converted or any(own != name for own, name in plan.renamed.items())


def test_a_directory_with_other_names_than_transformers_writes_is_refused(tmp_path, monkeypatch):
    from rl.models import hf_engine

    random_model("llama").save_pretrained(tmp_path)
    plan = hf_engine.disk_tensors

    def renamed(lm, tensors):
        made = copy.copy(plan(lm, tensors))
        object.__setattr__(made, "names", made.names | {"model.unheard_of.weight"})
        return made

    monkeypatch.setattr(hf_engine, "disk_tensors", renamed)
    with pytest.raises(ConfigError, match=r"1 tensors of LlamaForCausalLM under names .* model.unheard_of"):
        HFEngine(tmp_path)


def test_packed_rows_need_attention_that_is_told_of_them(tmp_path, capfd):
    """GPT-Neo's own attention has a mask as long as its positions, which a packed row may exceed."""
    random_model("gpt_neo", max_position_embeddings=64).save_pretrained(tmp_path)
    engine = HFEngine(tmp_path)
    assert (
        "computes padded rows (packed rows: 2 of its 2 layers have attention of their own)"
        in capfd.readouterr().out
    )
    rows = [np.random.default_rng(i).integers(2, 128, 50) for i in range(4)]
    batch = pack([supervised_sample(row[:1], row[1:]) for row in rows], max_tokens=256)
    assert len(engine.forward(batch)) == 4  # of 200 tokens in a row


# ---- adapters and experts


def test_an_adapter_that_peft_would_read_otherwise_is_refused(tmp_path):
    """PEFT reads an adapter of a dense or shared MLP as one of the stacked experts too."""
    import peft

    random_model("deepseek_v3").save_pretrained(tmp_path / "model")
    engine = HFEngine(tmp_path / "model", EngineConfig(adapters=True))
    for targets in (("gate_proj",), ("gate_proj", "up_proj"), ("down_proj", "o_proj")):
        with pytest.raises(
            ConfigError, match=r"which adapters of this model cannot have; use some of \['kv_a"
        ):
            engine.adapters.add("policy", LoRA(4, 8.0, targets))
    engine.adapters.add("policy", LoRA(4, 8.0, ("o_proj", "q_b_proj", "kv_b_proj")))
    with torch.no_grad():
        for parameter in engine.adapters["policy"].parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    engine.save_adapter("policy", tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = logits_of(base, ROW)
    theirs = logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), ROW)
    assert (theirs - before).abs().max() > 0.1
    assert (engine.logits(BATCH, "policy")[0] - theirs).abs().max() < LIMIT * theirs.std()


def test_a_weight_that_layers_share_has_no_adapter(tmp_path):
    """Each layer would have an adapter of its own, and the one weight cannot have all merged into it."""
    layers = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
    random_model("zamba2", **layers).save_pretrained(tmp_path / "model")
    engine = HFEngine(tmp_path / "model", EngineConfig(adapters=True))
    with pytest.raises(ConfigError, match=r"names \['q_proj'\], .* cannot have; use some of \['in_proj', 'l"):
        engine.adapters.add("policy", LoRA(4, 8.0, ("q_proj", "in_proj")))
    engine.adapters.add("policy", LoRA(4, 8.0, ("in_proj", "out_proj")))
    with torch.no_grad():
        for parameter in engine.adapters["policy"].parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    engine.save_hf(tmp_path / "merged", "policy")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    difference = engine.logits(BATCH, "policy")[0] - logits_of(merged, ROW)
    assert difference.abs().max() < LIMIT < (engine.logits(BATCH)[0] - logits_of(merged, ROW)).abs().max()


def test_the_dense_layers_of_titans_moe_have_no_adapter_of_their_mlp(tmp_path):
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    write_config(tmp_path, "qwen3_moe", **config)
    engine = TitanEngine(tmp_path, EngineConfig(seed=0, adapters=True))
    with pytest.raises(ConfigError, match=r"names \['gate_proj'\], which adapters of this model cannot have"):
        engine.adapters.add("policy", LoRA(4, 8.0, ("q_proj", "gate_proj")))


@pytest.mark.parametrize(
    ("width", "dtype", "is_computed"),
    [(33, "float32", True), (33, "bfloat16", False), (40, "bfloat16", True)],
)
def test_experts_of_a_width_that_bfloat16_cannot_have_are_refused_when_built(
    tmp_path, width, dtype, is_computed
):
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    write_config(tmp_path, "qwen3_moe", **config)
    if not is_computed:
        with pytest.raises(ConfigError, match=f"moe_intermediate_size={width}, which is no multiple of 8"):
            TitanEngine(tmp_path, EngineConfig(seed=0, dtype=dtype))
        return
    engine = TitanEngine(tmp_path, EngineConfig(seed=0, dtype=dtype))
    engine.forward_backward(pack([supervised_sample(ROW[:1], ROW[1:])], **engine.packing), CrossEntropy())


@pytest.mark.parametrize(
    ("width", "ranks", "fits"), [(40, 1, True), (40, 2, False), (48, 2, True), (64, 8, True), (64, 16, False)]
)
def test_each_tensor_parallel_rank_has_whole_rows_of_16_bytes(width, ranks, fits):
    config = {"num_experts": 4, "moe_intermediate_size": width}
    check_expert_width(config, "float32", ranks)
    check_expert_width({"moe_intermediate_size": width}, "bfloat16", ranks)  # of a model without experts
    if fits:
        check_expert_width(config, "bfloat16", ranks)
    else:
        with pytest.raises(ConfigError, match=f"over tensor_parallel={ranks} is no multiple of 8"):
            check_expert_width(config, "bfloat16", ranks)


@pytest.mark.parametrize(
    ("model_type", "suits"),
    [("qwen3", True), ("qwen3_moe", True), ("mixtral", False), ("hunyuan_v1_moe", False), ("mellum", False)],
)
def test_selective_checkpointing_gives_the_same_gradients_or_is_refused_when_built(
    tmp_path, model_type, suits
):
    """Some experts change in place what the policy keeps: torch says so at the first backward."""
    random_model(model_type).save_pretrained(tmp_path)
    selective = EngineConfig(activation_checkpointing="selective")
    if not suits:
        with pytest.raises(ConfigError, match="selective does not suit .*mutated.*; set it to full or none"):
            HFEngine(tmp_path, selective)
    gradients = []
    for config in (
        EngineConfig(),
        selective if suits else replace(selective, activation_checkpointing="full"),
    ):
        engine = HFEngine(tmp_path, config)
        engine.forward_backward(BATCH, CrossEntropy())
        gradients.append([local(p.grad).clone() for p in engine._learner(None).parameters.values()])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() < LIMIT
