"""What a run's settings become where vLLM reads them: apart from vLLM, which takes 10 s to import."""

from dataclasses import replace

import pytest

from rl.cluster.machine import parse_machine, this_machine
from rl.controller.config import GeneratorConfig, JudgeConfig
from rl.controller.device_defaults import by_device
from rl.controller.specs import actor_specs
from rl.models.generator.environment import generator_environment
from rl.models.generator.vllm_arguments import engine_args
from tests.controller.test_settings_effect import small


def given_to_vllm(tmp_path, **changes):
    config = by_device(replace(small(), **changes), this_machine())
    return engine_args(actor_specs(config, tmp_path, tmp_path).generator, on_cpu=True)


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
def test_a_generators_setting_reaches_vllm(tmp_path, generator, expected):
    arguments = given_to_vllm(tmp_path, generator=generator)
    assert {name: arguments[name] for name in expected} == expected


def test_sequences_and_the_dtype_are_the_trainers(tmp_path):
    config = small()
    trainer = replace(config.trainer, max_tokens=50)
    arguments = given_to_vllm(tmp_path, trainer=trainer, dtype="bfloat16")
    assert arguments["max_model_len"] == 50 and arguments["dtype"] == "bfloat16"
    assert arguments["max_num_batched_tokens"] >= 50


def test_weights_come_by_publishing_and_are_not_read_twice(tmp_path):
    arguments = given_to_vllm(tmp_path)
    assert arguments["load_format"] == "dummy" and arguments["skip_tokenizer_init"]
    judged = replace(small(), judge=JudgeConfig(model=small().model))
    specs = actor_specs(by_device(judged, this_machine()), tmp_path, tmp_path)
    of_judge = engine_args(specs.judge, on_cpu=True)
    assert of_judge["load_format"] == "auto" and not of_judge["skip_tokenizer_init"]


def test_graphs_are_captured_where_they_are_asked_for_and_prompts_are_cut_on_gpus_alone(tmp_path):
    on = by_device(replace(small(), generator=GeneratorConfig(cuda_graphs="on")), parse_machine("2xH100-80"))
    arguments = engine_args(actor_specs(on, tmp_path, tmp_path).generator, on_cpu=False)
    assert not arguments["enforce_eager"] and arguments["enable_chunked_prefill"]
    assert arguments["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert not engine_args(actor_specs(on, tmp_path, tmp_path).generator, on_cpu=True)[
        "enable_chunked_prefill"
    ]


@pytest.mark.parametrize("compiles", [False, True])
def test_a_generator_on_a_cpu_compiles_only_where_it_is_asked_to(compiles):
    """Else the first token waits ten seconds for a C++ compiler."""
    environment = generator_environment(1, compile=compiles)
    assert environment["TORCH_COMPILE_DISABLE"] == ("0" if compiles else "1")
