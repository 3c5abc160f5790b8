"""HFModel: a causal language model of transformers' whose forward computes logprobs of target tokens.

B rows (1 where packed), T tokens of a row, L tokens of a packed row, D hidden size, M target tokens,
V vocabulary, N heads, H head size.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_utils import AttentionInterface

from rl.errors import ConfigError
from rl.models.attention import PackedDocuments, pack_documents, packed_attention
from rl.models.target_logprobs import target_logprobs, target_values

_PACKED = "rl_packed"


class HFModel(nn.Module):
    """FSDP's root, so that the parameters outside the repeated layers are gathered too."""

    def __init__(self, lm: transformers.PreTrainedModel, with_value_head: bool):
        super().__init__()
        self.lm = lm
        self.value_head = None
        if with_value_head:
            self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1, bias=False)
            nn.init.zeros_(self.value_head.weight)
        self.packed = True
        self.vocab_size: int = lm.config.get_text_config().vocab_size
        self._after_head = _after_head(lm.config.get_text_config())

    def layers(self) -> dict[str, nn.Module]:
        """The repeated layers, by name."""
        lists = [(n, m) for n, m in self.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
        if not lists:
            raise ConfigError(
                f"{type(self.lm).__name__} has no list of layers to shard; "
                f"use an architecture that TitanEngine has"
            )
        name, longest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
        return {f"{name}.{i}": layer for i, layer in enumerate(longest)}

    def layers_to_shard(self) -> list[nn.Module]:
        """Layers without those that share parameters with another: FSDP's root takes these."""
        layers = list(self.layers().values())
        users = Counter(id(p) for layer in layers for p in layer.parameters())
        return [layer for layer in layers if all(users[id(p)] == 1 for p in layer.parameters())]

    def checkpoint_layers(self, policy: Any) -> None:
        holder = self.get_submodule(next(iter(self.layers())).rsplit(".", 2)[0])
        if not hasattr(holder, "layers"):
            raise ConfigError(
                f"activation checkpointing does not find the layers of {type(self.lm).__name__}; "
                f"set it to 'none'"
            )
        policy.apply(holder)

    def use(self, packed: bool) -> None:
        self.packed = packed
        self.lm.set_attn_implementation(_PACKED if packed else "eager")

    def bypasses_packing(self) -> str:
        """Why packing would not reach every attention layer with its sliding window; empty where it does.

        Some architectures have attention of their own, whose masks grow with the square of a packed row and
        end at the model's longest sequence. Some put windows only into the mask, which packing replaces. The
        comparison with transformers sees neither: its rows are shorter.
        """
        config = self.lm.config.get_text_config()
        types = list(getattr(config, "layer_types", None) or [])
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if getattr(config, "attention_chunk_size", None) or unknown:
            return "its layers do not all attend to the whole sequence or to a window of it"
        uses_window = getattr(config, "use_sliding_window", True)
        window = getattr(config, "sliding_window", None) if uses_window else None
        expected = types.count("sliding_attention") if types else config.num_hidden_layers if window else 0
        seen: list[int | None] = []
        tokens = torch.zeros(1, 1, dtype=torch.long, device=next(self.parameters()).device)
        documents = pack_documents(np.zeros(1, int), tokens.device)
        self(tokens, tokens, documents, tokens[0], None, seen)
        if len(seen) < (num_layers := len(types) or config.num_hidden_layers):
            return f"{num_layers - len(seen)} of its {num_layers} layers have attention of their own"
        num_told = sum(window is not None for window in seen)
        if num_told == expected:
            return ""
        return f"{expected} of its layers have a sliding window, but {num_told} tell attention"

    def compute(
        self, tokens: np.ndarray, positions: np.ndarray, predictors: np.ndarray, targets: np.ndarray | None
    ) -> Any:
        """tokens, positions: [L] packed; predictors: [M] indices into L. Returns what Engine._run does."""
        documents, device = None, next(self.parameters()).device
        if self.packed:
            documents = pack_documents(positions, device)
            tokens, positions = tokens[None], positions[None]
        else:
            tokens, positions, at = _document_rows(tokens, positions)
            predictors = at[predictors]

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        wanted = None if targets is None else tensor(targets)
        return self(tensor(tokens), tensor(positions), documents, tensor(predictors), wanted)

    def reference(self, tokens: torch.Tensor) -> torch.Tensor:
        """transformers' own logits [1, T, V]."""
        self.lm.set_attn_implementation("eager")
        return self(tokens, None, None, None, None)

    def forward(
        self,
        tokens: torch.Tensor,  # [B, T]
        positions: torch.Tensor | None,  # [B, T]
        documents: PackedDocuments | None,
        predictors: torch.Tensor | None,  # [M] indices into B * T; None for transformers' own forward
        targets: torch.Tensor | None,  # [M]
        windows: list[int | None] | None = None,  # takes each layer's sliding window, for inspection
    ) -> Any:
        if predictors is None:
            return self.lm(input_ids=tokens, use_cache=False).logits
        packing = {"packed_documents": documents, "packed_windows": windows} if documents is not None else {}
        h_BTD = self._body(input_ids=tokens, position_ids=positions, use_cache=False, **packing)[0]
        h_MD = h_BTD.flatten(0, 1).index_select(0, predictors)
        if self.value_head is not None and targets is not None:
            return target_values(F.linear(h_MD.float(), self.value_head.weight.float()), targets)
        return target_logprobs(self._logits, self.vocab_size, h_MD, targets)

    @property
    def _body(self) -> nn.Module:
        """What computes hidden states. Not every architecture's base_model_prefix names it (Llama 4)."""
        base = self.lm.base_model
        return base if base is not self.lm else self.lm.model

    def _logits(self, h_MD: torch.Tensor) -> torch.Tensor:
        head = self.lm.get_output_embeddings()
        return self._after_head(head(h_MD.to(head.weight.dtype)))  # state-space layers keep fp32 residuals


def _document_rows(tokens: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed [L] -> right-padded rows: tokens and positions [n, longest].

    Third comes where each token went: [L] indices into n * longest. Padding follows a document and repeats
    its last token: causal models never see it.
    """
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff([*starts, len(positions)])
    offsets = np.minimum(np.arange(lengths.max())[None, :], lengths[:, None] - 1)
    rows = np.repeat(np.arange(len(starts)), lengths)
    return tokens[starts[:, None] + offsets], offsets, rows * lengths.max() + positions


def _after_head(config: transformers.PretrainedConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """What some architectures do to their logits, by the names in their config."""
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        return lambda logits: torch.tanh(logits / cap) * cap
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        return lambda logits: logits / divisor
    if factor := getattr(config, "logit_scale", None):  # Cohere
        return lambda logits: logits * factor
    return lambda logits: logits


def _packed_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, N, T, H]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_documents: PackedDocuments | None = None,
    packed_windows: list[int | None] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers that computes packed rows of trees."""
    if packed_documents is None:
        raise NotImplementedError("its layers do not hand packing on to attention")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"its attention uses {name}")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError("its attention is not plainly causal")
    if packed_windows is not None:
        packed_windows.append(sliding_window)
    q_TNH, k_TNH, v_TNH = (t[0].transpose(0, 1) for t in (query, key, value))
    out = packed_attention(q_TNH, k_TNH, v_TNH, packed_documents, scaling, sliding_window, dropout)
    return out.unsqueeze(0), None


AttentionInterface.register(_PACKED, _packed_attention)
