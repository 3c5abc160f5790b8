"""Tokenizers with real chat templates, which the trl package has collected, on bytes as tokens."""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rl.models.tokenizer import HFTokenizer

_TRL = importlib.util.find_spec("trl")
assert _TRL is not None and _TRL.submodule_search_locations is not None
_TEMPLATES = Path(_TRL.submodule_search_locations[0]) / "chat_templates"

# name -> (the token that ends a turn, the tokenizer's EOS)
NAMES = {
    "qwen3": ("<|im_end|>", "<|im_end|>"),
    "qwen3_instruct_2507": ("<|im_end|>", "<|im_end|>"),
    "qwen2_5": ("<|im_end|>", "<|im_end|>"),
    "llama3": ("<|eot_id|>", "<|eot_id|>"),
    "llama3_1": ("<|eot_id|>", "<|eot_id|>"),
    "llama3_2": ("<|eot_id|>", "<|eot_id|>"),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "gemma3": ("<end_of_turn>", "<eos>"),
}
_SPECIAL = re.compile(r"<\|[a-z_0-9]+\|>|<(?:bos|eos|start_of_turn|end_of_turn)>")


# Templates whose calls are in formats that are not read.
OTHERS = {
    "gemma4": "<turn|>",
    "gptoss": "<|return|>",
    "lfm2": "<|im_end|>",
    "muse_glimmer": "<|eot|>",
    "nemotron_3_nano": "<|im_end|>",
    "qwen3_6": "<|im_end|>",
}


def make_tokenizer(
    name: str,
    directory: Path,
    end: str = "",
    tags: Sequence[str] = (),
    named: Mapping[str, str] | None = None,
) -> HFTokenizer:
    """end: the token that ends a turn, which is EOS too; by default as in NAMES.

    tags: more special tokens. named: more templates, by name; this one is then "tool_use".
    """
    template = (_TEMPLATES / f"{name}.jinja").read_text()
    end, eos = (end, end) if end else NAMES[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["Ġt", "he", "in", "12", "34", "ab"]  # so that text has several ways to be tokens
    merges = [tuple(pair) for pair in pairs]
    vocabulary = {token: i for i, token in enumerate([*letters, *pairs])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted({end, eos, "<bos>", *_SPECIAL.findall(template), *tags})
    tokenizer.add_special_tokens(special)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": eos,
        "chat_template": _named(named | {"tool_use": template}) if named else template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return HFTokenizer(directory)


def _named(templates: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]
