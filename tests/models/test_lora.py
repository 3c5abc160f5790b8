"""Adapters against PEFT: the same weights, in PEFT's format, give the same outputs and gradients."""

import copy
import json

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rl.batching import pack, supervised_sample
from rl.errors import ConfigError, RunError
from rl.loss.cross_entropy import CrossEntropy
from rl.models.adapters import OPTIMIZER
from rl.models.build import ENGINES
from rl.models.engine_config import EngineConfig
from rl.models.lora import read_adapter, write_adapter
from rl.types import LoRA, OptimParams
from tests.numeric import assert_close_as, error_of
from tests.tiny import write_model

ROW = np.random.default_rng(3).integers(0, 128, 40)
BATCH = pack([supervised_sample(ROW[:5], ROW[5:]), supervised_sample([1, 2], [3])])
TARGETS = {"all": LoRA(4, 8.0), "attention": LoRA(8, 4.0, ("q_proj", "v_proj"))}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(params=ENGINES)
def make(request, model_dir):
    return lambda **settings: ENGINES[request.param](model_dir, EngineConfig(adapters=True, **settings))


@pytest.fixture
def peft_dir(model_dir, tmp_path, request):
    """An adapter with weights of its own, written by PEFT; and PEFT's model."""
    lora = TARGETS[request.param]
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    targets = list(lora.targets)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    torch.manual_seed(5)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data.normal_(std=0.1)
    model.save_pretrained(tmp_path / "peft")
    return tmp_path / "peft", model


def answer_logprobs(model):
    """Of ROW from its token 5 on."""
    logits = model(torch.from_numpy(ROW)[None]).logits[0, 4:-1]
    return logits.log_softmax(-1)[torch.arange(35), torch.from_numpy(ROW[5:])]


def adapter_gradients(engine, name):
    return {n: p.grad for n, p in engine.adapters[name].parameters.items()}


@pytest.mark.parametrize("peft_dir", TARGETS, indirect=True)
def test_outputs_and_gradients_equal_pefts(make, peft_dir):
    path, reference = peft_dir
    engine = make()
    engine.adapters.load("a", path)
    logprobs, gradients = [], []
    for model in (reference, copy.deepcopy(reference).double()):
        logprobs.append(answer_logprobs(model))
        (-logprobs[-1].sum()).backward()
        named = model.named_parameters()
        gradients.append({n.replace(".default", ""): p.grad for n, p in named if "lora_" in n})
    assert_close_as(logprobs[0], engine.forward(BATCH, "a")[0], logprobs[1])
    engine.forward_backward(pack([supervised_sample(ROW[:5], ROW[5:])]), CrossEntropy(), "a")
    assert_close_as(gradients[0], adapter_gradients(engine, "a"), gradients[1])
    assert max(g.abs().max() for g in gradients[0].values()) > 0.1  # holds: meaning, they are not all near 0


@pytest.mark.parametrize("peft_dir", ["all"], indirect=True)
def test_the_base_and_a_fresh_adapter_compute_what_the_model_computes(make, model_dir, peft_dir):
    engine = make()
    engine.adapters.add("fresh", LoRA(4))
    engine.adapters.load("other", peft_dir[0])
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    in_fp32, exact = answer_logprobs(plain), answer_logprobs(copy.deepcopy(plain).double())
    for adapter in (None, "fresh"):
        assert_close_as(in_fp32, engine.forward(BATCH, adapter)[0], exact)
    assert error_of(engine.forward(BATCH, "other")[0], exact) > 0.1  # holds: meaning, another model


def test_adapters_learn_apart_and_the_base_stays(make):
    """Two tenants in turns equal each of them alone."""

    def learn(engine, name, step):
        sample = supervised_sample([step], ROW[:20] if name == "a" else ROW[20:])
        engine.forward_backward(pack([sample]), CrossEntropy(), name)
        engine.optim_step(OptimParams(1e-2), name)

    together, alone = make(), {name: make() for name in "ab"}
    for seed, name in enumerate("ab"):
        together.adapters.add(name, LoRA(4), seed)
        alone[name].adapters.add(name, LoRA(4), seed)
    base = {s.name: s.data.clone() for s in together.export()}
    for step in range(3):
        for name in "ab":
            learn(together, name, step)
    for name in "ab":
        for step in range(3):
            learn(alone[name], name, step)
        ours, theirs = ({s.name: s.data for s in engine.export(name)} for engine in (together, alone[name]))
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
        assert any(t.abs().max() > 0 for n, t in ours.items() if "lora_B" in n)
    assert all(torch.equal(base[s.name], s.data) for s in together.export())


@pytest.mark.parametrize("peft_dir", ["all"], indirect=True)
def test_peft_reads_what_is_saved_and_the_merged_model_equals_base_plus_adapter(
    make, model_dir, peft_dir, tmp_path
):
    engine = make()
    engine.adapters.load("a", peft_dir[0])
    engine.forward_backward(BATCH, CrossEntropy(), "a")
    engine.optim_step(OptimParams(1e-2), "a")
    engine.save_adapter("a", tmp_path / "saved")
    engine.save_hf(tmp_path / "merged", "a")
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ours = engine.forward(pack([supervised_sample(ROW[:5], ROW[5:])]), "a")[0]
    in_fp32 = answer_logprobs(with_adapter)
    exact = answer_logprobs(copy.deepcopy(with_adapter).double())
    for name, logprobs in (("ours", ours), ("merged", answer_logprobs(merged))):
        assert_close_as(in_fp32, logprobs, exact, name)
    exported = {s.name: s.data for s in engine.export("a", merged=True)}
    # holds: exact, one product of rank 4 added to a weight
    assert all(torch.allclose(p, exported[n], atol=1e-6) for n, p in merged.named_parameters())


def test_a_checkpoint_brings_adapters_back(make, tmp_path):
    engine = make()
    for name, rank in (("a", 4), ("b", 2)):
        engine.adapters.add(name, LoRA(rank), seed=rank)
        engine.forward_backward(BATCH, CrossEntropy(), name)
        engine.optim_step(OptimParams(1e-2), name)
    engine.save(tmp_path / "step-1")
    again = make()
    again.adapters.add("c", LoRA(4))
    again.adapters.add("a", LoRA(8))
    again.load(tmp_path / "step-1")
    assert sorted(again.adapters) == ["a", "b"]
    for e in (engine, again):
        e.forward_backward(BATCH, CrossEntropy(), "b")
        e.optim_step(OptimParams(1e-2), "b")
    for name in "ab":
        assert np.array_equal(engine.forward(BATCH, name)[0], again.forward(BATCH, name)[0])


def test_bf16_keeps_the_base_in_bf16_and_what_learns_in_fp32(make):
    engine = make(dtype="bfloat16")
    engine.adapters.add("a", LoRA(4))
    engine.forward_backward(BATCH, CrossEntropy(), "a")
    assert engine.optim_step(OptimParams(1e-2), "a")["grad_norm"] > 0  # holds: exact
    assert {p.dtype for p in engine._model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in engine.adapters["a"].parameters.values()} == {torch.float32}
    assert all(s.dtype == torch.bfloat16 for s in engine.export("a"))


def test_rank_alpha_and_targets_act(make):
    engine = make()
    only_q, loud = LoRA(4, targets=("q_proj",)), LoRA(4, alpha=64.0)
    for name, lora in (("r4", LoRA(4)), ("r8", LoRA(8)), ("q", only_q), ("loud", loud)):
        engine.adapters.add(name, lora)
        engine.forward_backward(BATCH, CrossEntropy(), name)
    norms = {name: engine.optim_step(OptimParams(1e-3), name)["grad_norm"] for name in engine.adapters}
    assert {p.shape[0] for n, p in engine.adapters["r8"].parameters.items() if "lora_A" in n} == {8}
    assert all("q_proj" in n for n in engine.adapters["q"].parameters)
    # holds: exact, B is 0 at first: the gradient scales with alpha alone
    assert norms["loud"] == pytest.approx(2 * norms["r4"], rel=1e-4)
    assert norms["q"] < norms["r4"]


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq"},
        {"alora_invocation_tokens": [5]},
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "all"},
        {"trainable_token_indices": [1]},
        {"layer_replication": [[0, 1]]},
        {"lora_bias": True},
        {"peft_type": "LOHA"},
        {"of_a_later_peft": 1},
    ],
)
@pytest.mark.parametrize("peft_dir", ["all"], indirect=True)
def test_an_adapter_that_computes_something_else_is_refused(peft_dir, changes):
    path, _ = peft_dir
    read_adapter(path)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    ((key, value),) = changes.items()
    with pytest.raises(ConfigError) as error:
        read_adapter(path)
    assert f"has {key}={value!r}, which is not supported" in str(error.value)


def test_a_checkpoint_from_before_the_first_adapter_is_loaded_by_those_alone_who_have_adapters(
    make, model_dir, tmp_path
):
    make().save(tmp_path / "none", {"step": 0})
    engine = make()
    assert engine.load(tmp_path / "none") == {"step": 0} and not [*engine.adapters]
    with pytest.raises(RunError, match="none holds adapters, which is not what learns here"):
        ENGINES["titan"](model_dir).load(tmp_path / "none")


def test_what_cannot_be_is_named(make, model_dir, tmp_path):
    engine = make()
    ENGINES["titan"](model_dir).save(tmp_path / "full")
    with pytest.raises(RunError, match="full holds a model's weights, which is not what learns here"):
        engine.load(tmp_path / "full")
    with pytest.raises(RunError, match="the model is frozen; name the adapter that learns"):
        engine.forward_backward(BATCH, CrossEntropy())
    with pytest.raises(RunError, match="there is no adapter 'x'; there are none"):
        engine.forward(BATCH, "x")
    with pytest.raises(ConfigError, match=r"lora.targets names \['wq'\].*use some of \['down_proj'"):
        engine.adapters.add("a", LoRA(4, targets=("wq",)))
    engine.adapters.add("a", LoRA(4))
    with pytest.raises(ConfigError, match="there is an adapter 'a' already"):
        engine.adapters.add("a", LoRA(4))
    with pytest.raises(ConfigError, match="is not an adapter: it needs adapter_config.json"):
        engine.adapters.load("b", tmp_path)
    engine.save_adapter("a", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ConfigError, match="has use_dora=True, which is not supported"):
        engine.adapters.load("b", tmp_path / "a")
    with pytest.raises(ConfigError, match="this engine's own weights learn"):
        ENGINES["titan"](model_dir).adapters.add("a", LoRA(4))


def test_an_adapters_state_goes_on_bit_for_bit(make, tmp_path):
    """Its weights and moments, as a server keeps one of many models; beside it another one learns on."""
    engine = make()

    def learn(name, steps):
        for _ in range(steps):
            engine.forward_backward(BATCH, CrossEntropy(), name)
            engine.optim_step(OptimParams(1e-2), name)

    engine.adapters.add("a", TARGETS["all"], seed=1)
    engine.adapters.add("b", TARGETS["attention"], seed=2)
    learn("a", 2)
    engine.adapters.save_state("a", tmp_path / "a", "base")
    learn("b", 1)
    learn("a", 2)
    expected = {n: p.detach().clone() for n, p in engine.adapters["a"].parameters.items()}
    others = {n: p.detach().clone() for n, p in engine.adapters["b"].parameters.items()}
    engine.adapters.load_state("a", tmp_path / "a")
    learn("a", 2)
    assert all(torch.equal(p, expected[n]) for n, p in engine.adapters["a"].parameters.items())
    assert all(torch.equal(p, others[n]) for n, p in engine.adapters["b"].parameters.items())
    engine.adapters.load_state("new", tmp_path / "a", optimizer=False)
    learn("new", 2)
    assert not all(torch.equal(p, expected[n]) for n, p in engine.adapters["new"].parameters.items())
    engine.save_adapter("b", tmp_path / "b")
    with pytest.raises(ConfigError, match="has no optimizer state"):
        engine.adapters.load_state("b", tmp_path / "b")
    moments = load_file(tmp_path / "a" / OPTIMIZER)
    moments.popitem()
    save_file(moments, tmp_path / "a" / OPTIMIZER)
    with pytest.raises(ConfigError, match="lacks the optimizer's"):
        engine.adapters.load_state("b", tmp_path / "a")
    assert all(torch.equal(p, others[n]) for n, p in engine.adapters["b"].parameters.items())


def test_who_may_read_an_adapters_config_may_read_its_weights(tmp_path):
    """vLLM may run as another user."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    write_adapter(tmp_path / "a", LoRA(2), "base", {name: torch.zeros(2, 3)})
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"]
