"""`rl fetch`: a directory is complete or not there, so that an interrupted fetch costs nothing but itself."""

import importlib.util
import subprocess
import sys

import pytest

from rl import fetch as module
from rl.errors import ConfigError, RunError
from rl.fetch import fetch

FILES = ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"]


def parts(monkeypatch, stop_after=None, error=None):
    """A download and a conversion that write FILES one by one and, after some, fail."""
    written = 0

    def write(path):
        nonlocal written
        if written == stop_after:
            raise error
        path.write_text("x")
        written += 1

    monkeypatch.setattr(module, "_download", lambda scratch: write(scratch / "gguf"))
    monkeypatch.setattr(module, "_convert", lambda scratch, out: [write(out / name) for name in FILES])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(2, "No such file"), RunError("no network")])
@pytest.mark.parametrize("stop_after", range(len(FILES) + 1))
@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_fetch_leaves_nothing_that_blocks_the_next(
    tmp_path, monkeypatch, stop_after, error, exists
):
    directory = tmp_path / "models" / "smollm2"
    if exists:  # and is empty
        directory.mkdir(parents=True)
    parts(monkeypatch, stop_after, error)
    with pytest.raises(type(error)):
        fetch(["smollm2", str(directory)])
    assert [*(tmp_path / "models").iterdir()] == [directory] * exists
    parts(monkeypatch)
    assert fetch(["smollm2", str(directory)]) == 0
    assert sorted(path.name for path in directory.iterdir()) == sorted(FILES)
    assert [*(tmp_path / "models").iterdir()] == [directory]


@pytest.mark.parametrize("stop_after", range(len(FILES)))
def test_a_disk_that_fills_up_is_named(tmp_path, monkeypatch, stop_after):
    parts(monkeypatch, stop_after, OSError(28, "No space left on device", "models/model.safetensors"))
    with pytest.raises(RunError, match="^the disk of models/model.safetensors is full; make room$"):
        fetch(["smollm2", str(tmp_path / "smollm2")])
    assert not [*tmp_path.iterdir()]


SLOW_FETCH = """
import sys, time
from rl import cli, fetch

def convert(scratch, out):
    print("half done", flush=True)
    time.sleep(60)

fetch._download, fetch._convert = lambda scratch: None, convert
sys.argv = ["rl", "fetch", "smollm2", sys.argv[1]]
cli.main()
"""


def test_one_that_is_terminated_removes_what_it_has_made(tmp_path):
    command = [sys.executable, "-u", "-c", SLOW_FETCH, str(tmp_path / "smollm2")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert any("half done" in line for line in process.stdout)
        assert [*tmp_path.iterdir()]
        process.terminate()
        assert process.wait(30) == 143 and "rl: interrupted" in process.stderr.read()
    assert not [*tmp_path.iterdir()]


def test_so_does_one_that_was_killed(tmp_path):
    code = (
        "import os, sys; from rl import fetch\n"
        "fetch._download = lambda scratch: None\n"
        "fetch._convert = lambda scratch, out: ((out / 'tokenizer.json').write_text('x'), os._exit(9))\n"
        "fetch.fetch(['smollm2', sys.argv[1]])"
    )
    directory = tmp_path / "smollm2"
    done = subprocess.run([sys.executable, "-c", code, str(directory)])
    assert done.returncode == 9
    done = subprocess.run([sys.executable, "-c", code.replace("os._exit(9)", "0"), str(directory)])
    assert done.returncode == 0 and (directory / "tokenizer.json").is_file()


def test_a_link_to_an_empty_directory_stays_a_link(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    parts(monkeypatch)
    assert fetch(["smollm2", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in (tmp_path / "real").iterdir()) == sorted(FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@pytest.mark.parametrize("name", [".", "./", "../here", "link", "here"])
def test_a_directory_that_cannot_be_replaced_is_refused_before_the_download(tmp_path, monkeypatch, name):
    """The current directory under every name, and one where a disk is mounted."""
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "link").symlink_to("here")
    if name == "here":
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("os.path.ismount", lambda path: str(path) == str(here))
    else:
        monkeypatch.chdir(here)
    parts(monkeypatch, stop_after=0, error=AssertionError("it downloads"))
    with pytest.raises(ConfigError, match="the directory .* is .*; give a new directory, such as "):
        fetch(["smollm2", str(tmp_path / name) if name == "link" else name])
    assert not [*here.iterdir()]


def test_a_directory_that_is_filled_meanwhile_is_refused(tmp_path, monkeypatch):
    parts(monkeypatch)
    convert = module._convert

    def fill(scratch, out):
        convert(scratch, out)
        (tmp_path / "smollm2").mkdir()
        (tmp_path / "smollm2" / "notes").touch()

    monkeypatch.setattr(module, "_convert", fill)
    with pytest.raises(ConfigError, match="smollm2 cannot be made .*; give another"):
        fetch(["smollm2", str(tmp_path / "smollm2")])
    assert [path.name for path in tmp_path.rglob("*")] == ["smollm2", "notes"]


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e4,
}  # fmt: skip
# name in Hugging Face's files -> in GGUF's, and the shape
LAYER = {
    "self_attn.q_proj": ("attn_q", (64, 64)), "self_attn.k_proj": ("attn_k", (32, 64)),
    "self_attn.v_proj": ("attn_v", (32, 64)), "self_attn.o_proj": ("attn_output", (64, 64)),
    "mlp.gate_proj": ("ffn_gate", (96, 64)), "mlp.up_proj": ("ffn_up", (96, 64)),
    "mlp.down_proj": ("ffn_down", (64, 96)), "input_layernorm": ("attn_norm", (64,)),
    "post_attention_layernorm": ("ffn_norm", (64,)),
}  # fmt: skip
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]


def vocabulary():
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, *(merge.replace(" ", "") for merge in MERGES), "<|im_start|>", "<|im_end|>"]


def write_gguf(path):
    """A Llama of a few elements in 4 bits, as llama.cpp writes it. Returns what its tensors are, as they are read."""
    import gguf
    import numpy as np

    writer, rng, tokens = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0), vocabulary()
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SIZES["rms_norm_eps"])
    writer.add_rope_freq_base(SIZES["rope_theta"])
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    special = [
        gguf.TokenType.CONTROL if token.startswith("<|") else gguf.TokenType.NORMAL for token in tokens
    ]
    writer.add_token_types(special)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages }}")
    kept = {}

    def add(name, theirs, shape, heads=0):
        tensor = rng.normal(size=shape).astype(np.float32)
        if tensor.ndim == 1:
            kept[name] = tensor
            writer.add_tensor(theirs, tensor)
            return
        kind = gguf.GGMLQuantizationType.Q4_1
        kept[name] = gguf.dequantize(gguf.quantize(tensor, kind), kind)
        if heads:  # llama.cpp turns by neighbouring pairs, transformers by halves
            tensor = tensor.reshape(heads, 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(theirs, gguf.quantize(tensor, kind), raw_dtype=kind)

    add("model.embed_tokens.weight", "token_embd.weight", (len(tokens), 64))
    add("model.norm.weight", "output_norm.weight", (64,))
    for layer in range(SIZES["num_hidden_layers"]):
        for name, (theirs, shape) in LAYER.items():
            heads = {"attn_q": 2, "attn_k": 1}.get(theirs, 0)
            add(f"model.layers.{layer}.{name}.weight", f"blk.{layer}.{theirs}.weight", shape, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.mark.parametrize("missing", ["gguf", "accelerate", "pip"])
def test_what_the_conversion_needs_is_looked_for_before_the_download(tmp_path, monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    monkeypatch.setattr(module, "_download", lambda scratch: pytest.fail("it downloads"))
    with pytest.raises(ConfigError, match=rf"rl fetch needs {missing}.*; run: "):
        module.fetch(["smollm2", str(tmp_path / "model")])


@pytest.mark.timeout(180)
def test_the_directory_holds_the_tensors_of_the_file_in_bf16(tmp_path):
    """And its sizes and tokens, as what trains and samples reads them."""
    import json

    import torch
    from safetensors.torch import load_file

    from rl.models.tokenizer import HFTokenizer

    (tmp_path / "scratch").mkdir()
    kept = write_gguf(tmp_path / "scratch" / module._GGUF)
    out_dir = tmp_path / "model"
    out_dir.mkdir()
    module._convert(tmp_path / "scratch", out_dir)
    tensors = load_file(out_dir / "model.safetensors")
    assert (out_dir / "model.safetensors").stat().st_mode == (out_dir / "config.json").stat().st_mode
    assert sorted(tensors) == sorted(kept)
    for name, tensor in kept.items():
        assert torch.equal(tensors[name], torch.from_numpy(tensor).bfloat16()), name
    config = json.loads((out_dir / "config.json").read_text())
    sizes = {name: config.get(name) for name in SIZES if name != "rope_theta"}
    assert sizes == pytest.approx({name: SIZES[name] for name in sizes})  # holds: exact, as JSON
    assert config["vocab_size"] == len(vocabulary()) and config["head_dim"] == 32
    assert config["tie_word_embeddings"] and "quantization_config" not in config
    assert (config.get("rope_theta") or config["rope_parameters"]["rope_theta"]) == SIZES["rope_theta"]
    assert str(config.get("dtype", config.get("torch_dtype"))) == "bfloat16"
    tokenizer, tokens = HFTokenizer(out_dir), vocabulary()
    assert tokenizer.encode_plain("hello hello") == [tokens.index("hello"), tokens.index("Ġhello")]
    assert tokenizer.eos_id == tokens.index("<|im_end|>") and tokenizer.chat_template == "{{ messages }}"
