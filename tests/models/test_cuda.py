"""What is decided by the kind of GPU, with a stand-in for it: which kernels, which settings, which memory."""

import ast
import importlib.util
import os
import types
from pathlib import Path

import pytest
import torch

from rl.cluster import machine
from rl.models import cuda
from rl.models.cuda import activate_flash_attention, expands_heads
from rl.models.generator.environment import generator_environment
from rl.models.generator.vllm_arguments import graph_args, memory_args, take_own_device
from rl.models.generator.vllm_config import Fill, VLLMConfig
from rl.weight_sync import buffers

# (compute capability, what importing its kernels raises, the kernels that are used)
KERNELS = [
    ((8, 0), None, "FA2"),
    ((8, 9), None, "FA2"),
    ((9, 0), None, "FA3"),
    ((9, 0), ImportError("no flash_attn_interface"), "FA2"),
    ((9, 0), RuntimeError("does not expose FA3 kernels"), "FA2"),
    ((10, 0), None, "FA4"),
    ((10, 3), ImportError("no flash_attn"), "FA2"),
    ((12, 0), None, "FA2"),
    ((12, 0), AssertionError("FA4 must not even be tried"), "FA2"),
]


@pytest.mark.parametrize("capability, failure, kernels", KERNELS)
def test_varlen_attention_takes_the_fastest_kernels_that_are_there(monkeypatch, capability, failure, kernels):
    tried = []

    def activate(name):
        tried.append(name)
        if failure:
            raise failure

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(cuda, "activate_flash_attention_impl", activate)
    assert activate_flash_attention() == kernels
    assert tried == ([cuda.FLASH_KERNELS[capability[0]]] if capability[0] in cuda.FLASH_KERNELS else [])


def test_torchtitan_s_own_varlen_attention_fails_where_ours_falls_back(monkeypatch):
    """The reason for the subclass: when this fails, torchtitan has learned to fall back itself."""
    from rl.models.gpu_attention import VarlenOrFlex

    import torchtitan.models.common.attention as titan_attention
    import torchtitan.tools.utils as titan_utils

    def missing(name):
        raise ImportError("no flash_attn_interface")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(titan_utils, "get_cuda_flash_attention_impl", lambda: "FA3")
    monkeypatch.setattr(titan_attention, "activate_flash_attention_impl", missing)
    monkeypatch.setattr(cuda, "activate_flash_attention_impl", missing)
    with pytest.raises(ImportError):
        titan_attention.VarlenAttention.Config().build()
    ours = VarlenOrFlex.Config().build()
    assert ours.kernels == "FA2" and ours.window_size == (-1, 0)


def test_cudnn_s_attention_is_turned_off():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        cuda.prepare_gpu()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_grouped_heads_are_repeated_where_no_kernel_has_groups(monkeypatch):
    assert [expands_heads(*of) for of in [
        ("cuda", torch.float32), ("cuda", torch.bfloat16), ("cpu", torch.float32), ("cpu", torch.bfloat16),
    ]] == [True, False, False, False]  # fmt: skip


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", "tf32")])
def test_triton_multiplies_fp32_as_it_is_in_a_generator_in_fp32(monkeypatch, dtype, precision):
    """Asked of Triton, which reads the environment of the generator's process."""
    triton = pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    for name, value in generator_environment(1, dtype=dtype).items():
        if name.startswith("TRITON"):
            monkeypatch.setenv(name, value)
    assert (triton.knobs.language.fp32_default or "tf32") == precision


# (CUDA_VISIBLE_DEVICES, GPUs that torch sees, what each is called)
MASKS = [
    (None, 3, ["0", "1", "2"]),
    ("2,3", 2, ["2", "3"]),
    ("GPU-1f6a, GPU-77c0", 2, ["GPU-1f6a", "GPU-77c0"]),
    ("0,1,-1,3", 2, ["0", "1"]),  # CUDA stops at the first that is none
    ("", 0, []),
]


@pytest.mark.parametrize("mask, count, names", MASKS)
def test_devices_are_named_as_the_mask_names_them(monkeypatch, tmp_path, mask, count, names):
    monkeypatch.setattr(machine, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert machine.visible_devices() == names
    monkeypatch.setattr(machine, "_DRIVERS", (str(tmp_path / "none"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("without a driver there is none"))
    assert machine.visible_devices() == []


def test_shards_of_a_device_go_through_one_pinned_buffer(monkeypatch):
    """With host memory that plays the device: what arrives, and that the buffer is made once for the largest."""
    made = []

    def empty(size, **options):
        made.append((size, options.pop("pin_memory")))
        return real(size, **options)

    real = torch.empty
    source = torch.arange(12.0).view(3, 4)
    monkeypatch.setattr(buffers, "_staging", real(0, dtype=torch.uint8))
    monkeypatch.setattr(buffers.torch, "empty", empty)
    monkeypatch.setattr(buffers, "_is_on_host", lambda tensor: False)
    for shape, dtype in (((3, 4), torch.bfloat16), ((2, 4), torch.bfloat16)):
        target = real(shape, dtype=dtype)
        buffers._copy_to_host(target, source[: shape[0]])
        assert target.float().tolist() == source[: shape[0]].tolist()
    assert made == [(24, True)]


# (settings of VLLMConfig, a GPU is there, arguments that vLLM is given)
VLLM_ARGUMENTS = [
    ({"kv_cache_gib": 0.5}, False, {"kv_cache_memory_bytes": 2**29}),
    ({"kv_cache_gib": 0.5}, True, {"kv_cache_memory_bytes": 2**29, "gpu_memory_utilization": 0.01}),
    ({"kv_cache_gib": Fill(60.0)}, True, {}),
]


@pytest.mark.parametrize("settings, has_gpu, expected", VLLM_ARGUMENTS)
def test_a_cache_of_a_given_size_asks_for_no_share_of_the_gpu(monkeypatch, settings, has_gpu, expected):
    """vLLM refuses to start where 92% of a card are not free, whatever the cache: other roles are there too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert memory_args(VLLMConfig("", **settings)) == expected


@pytest.mark.parametrize(
    "visible, local_rank, expected", [(1, "1", "0"), (4, "3", "3"), (0, "1", "1"), (1, None, None)]
)
def test_a_rank_that_is_shown_one_gpu_takes_it(monkeypatch, visible, local_rank, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    take_own_device()
    assert os.environ.get("LOCAL_RANK") == expected


def members_of(name):
    """The names and values of an enumeration of vLLM's, from its source: vLLM takes 10 s to import."""
    (place,) = importlib.util.find_spec("vllm").submodule_search_locations
    tree = ast.parse((Path(place) / "config" / "compilation.py").read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    assigned = [node for node in found.body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.unparse(node.value) for node in assigned}


def test_graphs_without_compiling():
    """In words that vLLM knows: it reads them as it starts, on a GPU."""
    given = graph_args(VLLMConfig("", cuda_graphs=True))["compilation_config"]
    assert given["cudagraph_mode"] in members_of("CUDAGraphMode")
    assert members_of("CompilationMode")["NONE"] == str(given["mode"])
    assert graph_args(VLLMConfig("", cuda_graphs=True, compile=True)) == {}  # vLLM's own choice
    assert graph_args(VLLMConfig("")) == {}


def test_doctor_says_what_a_gpu_machine_lacks(monkeypatch, capsys, tmp_path):
    from rl import doctor
    from rl.plan.cluster import Host

    monkeypatch.setattr(machine, "look_at_host", lambda: Host(8, 64.0))
    monkeypatch.setattr(doctor, "_version", lambda name: "0.32.0" if name == "vllm" else None)
    monkeypatch.setattr(doctor, "_driver", lambda: "535.104.05")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    paths = {**doctor.sysconfig.get_paths(), "include": str(tmp_path)}
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda *_: paths)
    problems: list[str] = []
    for_cuda = types.SimpleNamespace(__version__="2.13.0", version=types.SimpleNamespace(cuda="13.0"))
    doctor._devices(for_cuda, problems)
    assert len(problems) == 3
    assert "can use no GPU (driver: 535.104.05); update the driver" in problems[0]
    assert "no C compiler" in problems[1] and "no Python.h" in problems[2]
    assert "dtype                    float32" in capsys.readouterr().out
    others: list[str] = []
    for_cpus = types.SimpleNamespace(__version__="2.13.0+cpu", version=types.SimpleNamespace(cuda=None))
    doctor._devices(for_cpus, others)
    assert "torch 2.13.0+cpu is not; run: rm -rf .venv && make setup DEVICE=gpu" in others[0]
