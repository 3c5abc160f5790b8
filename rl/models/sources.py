"""Where a run's model comes from.

Both sources end in a Hugging Face directory; the rest of the code knows only that.
"""

import json
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl.bounds import FilePath
from rl.errors import ConfigError
from rl.hub import config_directory, hub_id, model_directory, small_directory
from rl.models import hf, hf_checks
from rl.models.known_shapes import known_config
from rl.models.tokenizer import HFTokenizer, tokenizer_of
from rl.paths import write_whole
from rl.types import LoRA

MODEL = "model"
"""Where a run has a model that it makes."""

_OF_THE_VOCABULARY = {"embed_tokens", "embeddings", "word_embeddings", "wte", "wpe", "lm_head"}


@dataclass(frozen=True)
class ModelDir:
    """A Hugging Face directory with config.json, safetensors weights and a tokenizer, here or on the Hub."""

    path: FilePath
    """The directory, or a model's id on the Hugging Face Hub, as Qwen/Qwen3-0.6B (@revision)."""

    random_weights: ClassVar[bool] = False

    @property
    def directory(self) -> str:
        return model_directory(self.path)

    def materialize(self, run_dir: Path) -> Path:
        return Path(self.directory)

    def validate(self) -> list[str]:
        try:
            hf_checks.check_config(hf.read_config(self.directory))
            hf_checks.check_known(self.directory)
            self._check_weights()
            tokenizer_of(self.directory)
        except ConfigError as error:
            return [str(error)]
        return []

    def _check_weights(self) -> None:
        hf.check_weights(self.directory)

    def without_weights(self) -> "ModelDir":
        """Itself, or of a model on the Hub all but its weights."""
        return self if hub_id(self.path) is None else _Listed(self.path)

    def tokenizer(self) -> HFTokenizer:
        return tokenizer_of(self.directory)

    def linear_layers(self) -> set[str]:
        """The last parts of its matrices' names, among which adapters choose.

        Not the vocabulary's, nor those that experts have.
        """
        shapes = hf.tensor_shapes(self.directory)
        matrices = [
            name.split(".") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2
        ]
        of_experts = {parts[-2] for parts in matrices if "experts" in parts[:-2]}
        return {parts[-2] for parts in matrices if len(parts) > 1} - _OF_THE_VOCABULARY - of_experts

    def num_elements(self) -> int:
        """Of the tensors in its files. Raises ConfigError where there are none."""
        return sum(map(math.prod, hf.tensor_shapes(self.directory).values()))

    def config(self) -> dict:
        """Of a public model that is not here and cannot be fetched, its sizes. Raises ConfigError."""
        try:
            return hf.read_config(config_directory(self.path))
        except ConfigError:
            if (known := known_config(self.path)) is None:
                raise
            return known

    def unknown_characters(self, text: str) -> str:
        """Those that its tokenizer has no token for. None where it has no tokenizer, as `validate` says."""
        try:
            return tokenizer_of(self.directory).unknown_characters(text)
        except ConfigError:
            return ""

    def not_one_token(self, texts: Iterable[str]) -> list[str]:
        """Those that its tokenizer does not make one token of."""
        tokenizer = tokenizer_of(self.directory)
        return [text for text in texts if len(tokenizer.encode_plain(text)) != 1]

    def why_no_chat(self) -> str:
        """What is wrong with its chat template."""
        return tokenizer_of(self.directory).why_no_chat()


@dataclass(frozen=True)
class _Listed(ModelDir):
    """A model on the Hub whose weights are not fetched: for commands that start nothing."""

    @property
    def directory(self) -> str:
        return small_directory(self.path)

    def _check_weights(self) -> None:
        """A run fetches them."""

    def linear_layers(self) -> set[str]:
        """Raises ConfigError where its weights are not all here, from an earlier download."""
        super()._check_weights()
        return super().linear_layers()

    def num_elements(self) -> int:
        super()._check_weights()
        return super().num_elements()


@dataclass(frozen=True)
class TinyQwen3:
    """A small Qwen3 with random weights and a tokenizer of single characters."""

    alphabet: str
    """The characters it knows, beside PAD, BOS and EOS."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_layers: int = 2
    """Decoder layers."""
    intermediate_size: int = 192
    """Width of the feed-forward layers."""
    num_heads: int = 2
    """Query heads of 32 dimensions each."""
    num_kv_heads: int = 1
    """Key and value heads."""
    max_length: int = 128
    """Longest sequence, in tokens."""

    random_weights: ClassVar[bool] = True  # drawn once, from the run's seed, by the first engine that starts

    def materialize(self, run_dir: Path) -> Path:
        path = run_dir / MODEL
        path.mkdir(parents=True, exist_ok=True)
        write_whole(path / "config.json", json.dumps(self.config(), indent=1).encode(), durable=False)
        write_character_tokenizer(self.alphabet, path)
        return path

    def validate(self) -> list[str]:
        if twice := sorted({char for char in self.alphabet if self.alphabet.count(char) > 1}):
            return [f"model.alphabet={self.alphabet!r} repeats {''.join(twice)!r}; name each character once"]
        sizes = ("hidden_size", "num_layers", "intermediate_size", "num_heads", "num_kv_heads", "max_length")
        values = {name: getattr(self, name) for name in sizes}
        problems = [f"model.{name}={size} must be at least 1" for name, size in values.items() if size < 1]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}; "
                f"use a divisor"
            )
        return problems

    def without_weights(self) -> "TinyQwen3":
        return self

    def not_one_token(self, texts: Iterable[str]) -> list[str]:
        return [text for text in texts if len(text) != 1 or text not in self.alphabet]

    def why_no_chat(self) -> str:
        return "" if set(_CHAT_CHARACTERS) <= set(self.alphabet) else "has no chat template"

    def tokenizer(self) -> HFTokenizer:
        with tempfile.TemporaryDirectory() as directory:
            return HFTokenizer(self.materialize(Path(directory)))

    def linear_layers(self) -> set[str]:
        return set(LoRA.targets)

    def num_elements(self) -> int:
        """0: there are no files yet."""
        return 0

    def unknown_characters(self, text: str) -> str:
        """Those that its tokenizer would turn into padding."""
        return "".join(sorted(set(text) - set(self.alphabet)))

    def config(self) -> dict:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": -(-(len(self.alphabet) + 3) // 64) * 64,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": 32,
            "max_position_embeddings": self.max_length,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


ModelSource = ModelDir | TinyQwen3

_CHAT_CHARACTERS = ">[](),="
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ ',' if not loop.first }}"
    "{{ name }}={{ value | tojson if value is string else value }}{% endfor %})]{% endfor %}"
    "{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}{# tools: known, not described #}"
)
"""A user's words and a tool's result end with >, the assistant's turns with EOS. Calls are as in Python."""


def write_character_tokenizer(alphabet: str, out_dir: Path) -> None:
    """Write a tokenizer that transformers loads: PAD 0, BOS 1, EOS 2, then one token for each character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # . is no newline
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.add_special_tokens(special)
    write_whole(out_dir / "tokenizer.json", tokenizer.to_str(pretty=True).encode(), durable=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    if set(_CHAT_CHARACTERS) <= set(alphabet):
        settings["chat_template"] = _CHAT_TEMPLATE
    write_whole(out_dir / "tokenizer_config.json", json.dumps(settings, indent=1).encode(), durable=False)
