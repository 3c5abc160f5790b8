"""What vLLM samples with: base and adapters sent apart, several at once, merged, and a mixture of experts."""

# holds: meaning, an adapter that is not applied moves logprobs by over 1e-2

import numpy as np
import pytest
import torch
import transformers

from rl.batching import pack, supervised_sample
from rl.loss.cross_entropy import CrossEntropy
from rl.models.engine_config import EngineConfig
from rl.models.generator.vllm_config import VLLMConfig
from rl.models.titan import TitanEngine
from rl.types import LoRA, OptimParams
from rl.weight_sync.shared_memory import SharedMemory
from tests.devices import limit
from tests.models.generators import SMALL, ask, publish
from tests.tiny import write_model

PROMPT = [5, 9, 17, 3]
BATCH = pack([supervised_sample([1, 2, 3], np.arange(20, 40)), supervised_sample([4], np.arange(60, 70))])


def target_logprobs(engine, tokens, adapter=None):
    return engine.forward(pack([supervised_sample(PROMPT, tokens)]), adapter)[0]


def test_adapters_in_vllm_equal_the_trainer_the_merged_model_and_transformers(tmp_path):
    write_model(tmp_path / "model", initializer_range=0.2)
    engine = TitanEngine(tmp_path / "model", EngineConfig(adapters=True))
    transport = SharedMemory(str(tmp_path))
    loras = {"a": LoRA(4, 64.0), "b": LoRA(8, 64.0, ("q_proj", "gate_proj", "up_proj"))}

    def learn(name, seed):
        sample = supervised_sample([seed], np.arange(20 * seed, 20 * seed + 19))
        engine.forward_backward(pack([sample]), CrossEntropy(), name)
        engine.optim_step(OptimParams(3e-2), name)

    loads = [("base", publish(transport, "model", 0, engine.export()), [None, "a"])]
    expected = {}
    for seed, (name, lora) in enumerate(loras.items(), 1):
        engine.adapters.add(name, lora, seed)
        learn(name, seed)
        published = publish(transport, name, 1, engine.export(name), (name, lora))
        loads.append((name, published, [None, *list(loras)[:seed]]))
    first = {name: {s.name: s.data.clone() for s in engine.export(name)} for name in loras}
    learn("a", 3)
    published = publish(transport, "a", 2, engine.export("a"), ("a", loras["a"]))
    loads.append(("a again", published, ["a", "b", None, "a"]))
    loads.append(("merged", publish(transport, "model", 3, engine.export("a", merged=True)), [None, "a"]))
    engine.save_hf(tmp_path / "merged", "a")
    config = VLLMConfig(
        str(tmp_path / "model"), **SMALL, max_lora_rank=8, max_adapters=2, lora_targets=LoRA().targets
    )
    answers = ask(tmp_path, config, transport, PROMPT, loads)

    # Room for an adapter of the embedding and the head is as much as for all the others of a small model.
    wrapped = [name for name in answers["with adapters"] if name.endswith("WithLoRA")]
    assert wrapped and not any("Embedding" in name or "Logits" in name for name in wrapped)
    assert "the generator has no adapter 'a' yet" in answers["base/a"]
    assert "no adapter 'a' yet" in answers["merged/a"]
    asked = [("base", None), ("a", None), ("b", None), ("b", "b")]
    for label, adapter in [*asked, ("a again", "a"), ("a again", "b"), ("a again", None)]:
        tokens, logprobs = answers[f"{label}/{adapter}"]
        expected[label, adapter] = target_logprobs(engine, tokens, adapter)
        assert np.abs(expected[label, adapter] - logprobs).max() < limit("generator in fp32"), (
            label,
            adapter,
        )
    # The earlier version of "a" was another policy: what was sent is what is sampled with.
    for name in loras:
        assert any(t.abs().max() > 0 for n, t in first[name].items() if "lora_B" in n)
    assert np.abs(target_logprobs(engine, answers["a/a"][0], "a") - answers["a/a"][1]).max() > 1e-2
    # Merged: vLLM, transformers and the trainer agree.
    tokens, logprobs = answers["merged/None"]
    assert tokens == answers["a again/a"][0] != answers["base/None"][0]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        logits = merged(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    by_transformers = logits.log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()
    assert max(
        np.abs(by_transformers - other).max() for other in (logprobs, answers["a again/a"][1])
    ) < limit("generator in fp32")


@pytest.mark.slow
def test_a_mixture_of_experts_is_sampled_as_it_is_trained(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    write_model(tmp_path / "model", "qwen3_moe", norm_topk_prob=True, **sizes)
    engine = TitanEngine(tmp_path / "model")
    transport = SharedMemory(str(tmp_path))
    loads = []
    for version in range(2):
        loads.append((str(version), publish(transport, "model", version, engine.export()), [None]))
        engine.save_hf(tmp_path / str(version))
        engine.forward_backward(BATCH, CrossEntropy())
        engine.optim_step(OptimParams(3e-2))
    config = VLLMConfig(str(tmp_path / "model"), **SMALL)
    answers = ask(tmp_path, config, transport, PROMPT, loads)
    for version in range(2):
        tokens, logprobs = answers[f"{version}/None"]
        assert np.abs(target_logprobs(TitanEngine(tmp_path / str(version)), tokens) - logprobs).max() < limit(
            "generator in fp32"
        )
    assert answers["0/None"] != answers["1/None"]
