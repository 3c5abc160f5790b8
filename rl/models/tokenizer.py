"""The tokenizer of a Hugging Face directory."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rl.errors import ConfigError, message_of, one_line

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_BYTE, _SPACE = re.compile("<0x([0-9A-Fa-f]{2})>"), "\u2581"  # as SentencePiece writes them


class HFTokenizer:
    """Text to token ids and back.

    Raises ConfigError where the directory has no tokenizer or the tokenizer no EOS.
    """

    def __init__(self, model_dir: str | Path):
        # transformers would make an empty tokenizer rather than say that there is none.
        if not any((Path(model_dir) / name).is_file() for name in _FILES):
            raise ConfigError(
                f"model directory {model_dir} has no tokenizer ({', '.join(_FILES)}); "
                f"copy tokenizer.json there"
            )
        try:
            self._tokenizer = _tokenizer_class(Path(model_dir)).from_pretrained(str(model_dir))
        except Exception as error:  # whatever a broken file makes of the libraries that read it
            cause = one_line(error)
            raise ConfigError(
                f"model directory {model_dir} has no readable tokenizer ({cause:.200}); "
                f"copy tokenizer.json there"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer in {model_dir} names no eos_token; add it to tokenizer_config.json"
            )
        self.eos_id: int = self._tokenizer.eos_token_id
        self.chat_template: str = _with_tools(self._tokenizer.chat_template)

    def why_no_chat(self) -> str:
        """What is wrong with its chat template; empty where it works."""
        if self._tokenizer.chat_template is None:
            return "has no chat template"
        try:
            self.encode_chat("Hello")
        except Exception as error:  # the template is a program
            return f"has a chat template that fails ({message_of(error):.100})"
        return ""

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token -> id."""
        return self._tokenizer.get_vocab()

    def unknown_characters(self, text: str) -> str:
        """Those that it makes its token for unknown words of; none where it falls back to bytes."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        unknown = getattr(backend and backend.model, "unk_token", None) or self._tokenizer.unk_token
        if unknown is None:
            return ""
        number = self._tokenizer.convert_tokens_to_ids(unknown)
        return "".join(char for char in sorted(set(text)) if number in self.encode_plain(char))

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the tokenizer puts at the beginning of a text."""
        return self._tokenizer.encode(text)

    def encode_plain(self, text: str) -> list[int]:
        """Without special tokens: what continues a prompt."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_chat(self, user: str, system: str = "") -> list[int]:
        """One user's turn in the model's chat template, ready for the assistant's answer."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.encode_messages([*messages, {"role": "user", "content": user}])

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation in the model's chat template, ready for the assistant's answer.

        messages: {role, content} and what else the template reads.
        """
        settings = {"add_generation_prompt": True, "return_dict": False}
        return list(self._tokenizer.apply_chat_template(list(messages), **settings))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        """A conversation as text, by the chat template. tools: as OpenAI's API describes them."""
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens, of which tags of thoughts and tool calls are none in any vocabulary."""
        if self._special_tags.keys().isdisjoint(tokens):
            return self._tokenizer.decode(tokens, skip_special_tokens=True)
        parts, begin = [], 0
        for end, token in enumerate([*tokens, None]):
            if token is None or token in self._special_tags:
                parts.append(self._tokenizer.decode(tokens[begin:end], skip_special_tokens=True))
                parts.append("" if token is None else self._special_tags[token])
                begin = end + 1
        return "".join(parts)

    def decode_with_special(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def token_bytes(self, token: int) -> bytes:
        """What the token stands for, which may be a part of a character; empty where it is none."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._added:
            return piece.encode()
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if self._is_byte_level:
            return bytes(_BYTES[char] for char in piece if char in _BYTES)
        return piece.replace(_SPACE, " ").encode()

    @cached_property
    def _special_tags(self) -> dict[int, str]:
        added = self._tokenizer.added_tokens_decoder
        return {
            token: text.content for token, text in added.items() if text.special and text.content in _TAGS
        }

    @cached_property
    def _added(self) -> frozenset[int]:
        """Special tokens, and those that a vocabulary was extended by. transformers makes the table anew each
        time it is asked."""
        return frozenset(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and "ByteLevel" in repr(backend.decoder)


def _with_tools(template: str | Mapping[str, str] | None) -> str:
    """Of several templates by name, the one that transformers takes for a conversation with tools."""
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template or ""


def _byte_level() -> dict[str, int]:
    """Character -> byte, as byte-level vocabularies write them (Radford et al. 2019, GPT-2's encoder.py)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in visible)
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_level()


def tokenizer_of(model_dir: str | Path) -> HFTokenizer:
    """Of a directory one, until a file there changes: a start looks at it nine times, for 0.3 s each."""
    path = Path(model_dir).absolute()
    files = sorted(file for kind in ("*.json", "*.model", "*.jinja", "*.txt") for file in path.glob(kind))
    return _loaded(path, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=4)
def _loaded(model_dir: Path, files: tuple[tuple[Path, int, int], ...]) -> HFTokenizer:
    return HFTokenizer(model_dir)


def _tokenizer_class(model_dir: Path) -> Any:
    """AutoTokenizer takes 2 s to import. Of a Qwen3 that names a plain tokenizer it would take this class."""
    named = (
        _setting(model_dir / "config.json", "model_type"),
        _setting(model_dir / "tokenizer_config.json", "tokenizer_class"),
    )
    if named == ("qwen3", "PreTrainedTokenizerFast"):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _setting(file: Path, name: str) -> Any:
    return json.loads(file.read_bytes()).get(name) if file.is_file() else None
