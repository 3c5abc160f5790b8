"""What a run's settings become where vLLM reads them: apart from vLLM, which takes 10 s to import."""

import ast
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl.config import GeneratorConfig, JudgeConfig, TrainerConfig
from rl.config.settle import settle
from rl.models.generator.environment import generator_environment
from rl.models.generator.vllm_arguments import engine_args
from rl.models.generator.vllm_config import LORA_RANKS, served_rank
from rl.types import LoRA
from tests.config.test_settings_effect import small
from tests.envs.chat.templates import make_tokenizer
from tests.plans import AMPLE, cluster


def given_to_vllm(on_cpu=True, hosts=AMPLE, role="generator", **changes):
    config = replace(small(), **changes)
    config = replace(config, model=replace(config.model, num_kv_heads=2))  # for two ranks
    plan = settle(config, cluster=hosts)
    return engine_args(plan.of(role)[0].spec.config, on_cpu)


ROWS = [
    (GeneratorConfig(), {"enforce_eager": True}),
    (GeneratorConfig(compile=True), {"enforce_eager": False}),
    (GeneratorConfig(max_num_seqs=7), {"max_num_seqs": 7}),
    (GeneratorConfig(block_size=64), {"block_size": 64}),
    (GeneratorConfig(kv_cache_gib=0.125), {"kv_cache_memory_bytes": 2**27}),
    (GeneratorConfig(tensor_parallel=2), {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}),
    (GeneratorConfig(tensor_parallel=1), {"tensor_parallel_size": 1, "distributed_executor_backend": None}),
]  # fmt: skip


@pytest.mark.parametrize(("generator", "expected"), ROWS)
def test_a_generators_setting_reaches_vllm(generator, expected):
    arguments = given_to_vllm(generator=generator)
    assert {name: arguments[name] for name in expected} == expected


def test_adapters_are_of_the_layers_that_the_setting_names():
    """Else vLLM makes room for those of all layers, experts too."""
    arguments = given_to_vllm(trainer=TrainerConfig(lora=LoRA(rank=4, targets=("q_proj", "down_proj"))))
    assert arguments["lora_target_modules"] == ["q_proj", "down_proj"] and arguments["max_lora_rank"] == 8
    assert "lora_target_modules" not in given_to_vllm()


def test_sequences_and_the_dtype_are_the_trainers():
    arguments = given_to_vllm(max_seq_len=50, dtype="bfloat16")
    assert arguments["max_model_len"] == 50 and arguments["dtype"] == "bfloat16"
    assert arguments["max_num_batched_tokens"] >= 50


def test_weights_come_by_publishing_and_are_not_read_twice():
    arguments = given_to_vllm()
    assert arguments["load_format"] == "dummy" and arguments["skip_tokenizer_init"]
    of_judge = given_to_vllm(role="judge", judge=JudgeConfig(model=small().model))
    assert of_judge["load_format"] == "auto" and not of_judge["skip_tokenizer_init"]


def test_graphs_are_captured_where_they_are_asked_for_and_prompts_are_cut_on_gpus_alone():
    on = {"hosts": cluster("2xH100-80"), "generator": GeneratorConfig(cuda_graphs="on")}
    arguments = given_to_vllm(on_cpu=False, **on)
    assert not arguments["enforce_eager"] and arguments["enable_chunked_prefill"]
    assert arguments["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert not given_to_vllm(on_cpu=True, **on)["enable_chunked_prefill"]


@pytest.mark.parametrize(("graphs", "expected"), [("on", None), ("off", {"cudagraph_mode": "NONE"})])
def test_of_a_model_that_is_compiled_vllm_chooses_the_graphs_unless_there_are_to_be_none(graphs, expected):
    generator = GeneratorConfig(compile=True, cuda_graphs=graphs)
    arguments = given_to_vllm(on_cpu=False, hosts=cluster("2xH100-80"), generator=generator)
    assert not arguments["enforce_eager"] and arguments.get("compilation_config") == expected


@pytest.mark.parametrize("compiles", [False, True])
def test_a_generator_on_a_cpu_compiles_only_where_it_is_asked_to(compiles):
    """Else the first token waits ten seconds for a C++ compiler."""
    environment = generator_environment(1, compile=compiles)
    assert environment["TORCH_COMPILE_DISABLE"] == ("0" if compiles else "1")


@pytest.mark.parametrize("here", [False, True])
def test_a_generator_s_own_device_decides_and_not_the_controllers(here, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: here)
    assert generator_environment(1, on_gpu=True)["TORCH_COMPILE_DISABLE"] == "0"
    assert generator_environment(1, on_gpu=False)["TORCH_COMPILE_DISABLE"] == "1"


def test_a_generator_does_without_the_sampler_that_takes_no_seeds():
    """vLLM would load it, and compile it with nvcc, where every request here has a seed."""
    assert generator_environment(1)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


STOPS = """
import sys
from types import SimpleNamespace
from transformers import PreTrainedTokenizerFast
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from rl.models.generator.vllm_engine import _vllm_params
from rl.types import SamplingParams

tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
params = _vllm_params(SamplingParams(9, stop_texts=("<|im_start|>",)))
request = SimpleNamespace(sampling_params=params, prompt_token_ids=[0], request_id="0")
detokenizer = FastIncrementalDetokenizer(tokenizer, request)
for token in tokenizer.encode("Hello<|im_start|>user", add_special_tokens=False):
    if stop := detokenizer.update([token], False):
        print("stopped at", stop)
        break
"""


@pytest.mark.slow
def test_vllm_stops_at_a_stop_string_that_is_a_special_token(tmp_path):
    make_tokenizer("qwen3", tmp_path)
    command = [sys.executable, "-c", STOPS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert "stopped at <|im_start|>" in done.stdout, done.stderr


def test_the_ranks_of_adapters_are_those_for_which_vllm_makes_room():
    (place,) = importlib.util.find_spec("vllm").submodule_search_locations  # whose import takes seven seconds
    tree = ast.parse((Path(place) / "config" / "lora.py").read_text())
    (ranks,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "MaxLoRARanks")
    assert ast.literal_eval(ranks.slice) == LORA_RANKS
    assert [served_rank(rank) for rank in (1, 2, 65, 512)] == [1, 8, 128, 512]
