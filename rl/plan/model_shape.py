"""The sizes of a model, from its config.json, and what follows from them alone.

D hidden size, F hidden size of a feed-forward layer, N query heads, K key heads, H head size, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.errors import ConfigError
from rl.types import LoRA

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelShape:
    """The sizes in a config.json: a decoder of equal layers, some or all of them of experts."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int  # F of a dense layer
    vocab_size: int
    tied: bool
    qk_norm: bool
    num_moe_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_dim: int = 0  # F of an expert

    @staticmethod
    def of(hf: Mapping[str, Any]) -> "ModelShape":
        """hf: the contents of config.json. Raises ConfigError where it names no such decoder."""
        try:
            dim, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
            experts = hf.get("num_experts") or hf.get("num_local_experts") or 0
            dense = set(hf.get("mlp_only_layers") or [])
            every = hf.get("decoder_sparse_step") or 1
            in_turn = layers // every - sum(i < layers and (i + 1) % every == 0 for i in dense)
            shape = ModelShape(
                dim=dim,
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=hf.get("num_key_value_heads") or heads,
                head_dim=hf.get("head_dim") or dim // heads,
                hidden_dim=hf["intermediate_size"],
                vocab_size=hf["vocab_size"],
                tied=bool(hf.get("tie_word_embeddings", False)),
                qk_norm=str(hf.get("model_type", "")).startswith("qwen3"),
                num_moe_layers=in_turn if experts else 0,
                num_experts=experts,
                top_k=hf.get("num_experts_per_tok") or 0,
                expert_dim=hf.get("moe_intermediate_size") or (hf["intermediate_size"] if experts else 0),
            )
            if odd := [value for value in vars(shape).values() if not isinstance(value, int)]:
                raise TypeError(f"{odd[0]!r} is no whole number")
            return shape
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(f"config.json does not give the sizes of a decoder: {error!r}") from error

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of the largest layer."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        experts = self.num_experts * (3 * self.dim * self.expert_dim + self.dim)  # with the router
        return attention + (experts if self.num_moe_layers else 3 * self.dim * self.hidden_dim)

    @property
    def matrices(self) -> int:
        """Elements of all matrices, the embeddings and the head among them."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        dense = 3 * self.dim * self.hidden_dim * (self.num_layers - self.num_moe_layers)
        experts = self.num_moe_layers * self.num_experts * (3 * self.dim * self.expert_dim + self.dim)
        return self.num_layers * attention + dense + experts + self.vocabulary

    @property
    def vocabulary(self) -> int:
        """Elements of the embeddings, and of the head where it is another tensor."""
        return self.vocab_size * self.dim * (1 if self.tied else 2)

    @property
    def vectors(self) -> int:
        """Elements of the norms."""
        return self.num_layers * (2 * self.dim + 2 * self.head_dim * self.qk_norm) + self.dim

    @property
    def num_parameters(self) -> int:
        return self.matrices + self.vectors

    def adapter_elements(self, lora: LoRA) -> int:
        """Of a LoRA adapter on dense layers."""
        q, k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sides = {
            "q_proj": (self.dim, q), "k_proj": (self.dim, k), "v_proj": (self.dim, k),
            "o_proj": (q, self.dim), "gate_proj": (self.dim, self.hidden_dim),
            "up_proj": (self.dim, self.hidden_dim), "down_proj": (self.hidden_dim, self.dim),
        }  # fmt: skip
        return self.num_layers * lora.rank * sum(sum(sides[t]) for t in lora.targets if t in sides)

    def kv_bytes(self, dtype: str, tensor_parallel: int = 1) -> float:
        """Of one token in the key-value cache of a rank."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES[dtype] / tensor_parallel
