"""The sizes of a model, from its config.json, and what follows from them alone.

D hidden size, F hidden size of a feed-forward layer, N query heads, K key heads, H head size, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.errors import ConfigError
from rl.models.experts import COUNTS, num_experts
from rl.types import LoRA

BYTES = {"float32": 4, "bfloat16": 2}
TIED = frozenset({
    "bloom", "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "falcon", "falcon_mamba",
    "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo",
    "granite_swa", "lfm2", "lfm2_moe", "mamba", "minicpm3", "opt", "smollm3", "starcoder2", "vaultgemma",
    "zamba2",
})  # fmt: skip
"""model_type of those whose config.json need not say that embeddings and head are one tensor."""
UNLIKE = frozenset({"falcon_h1", "gemma4_text", "llama4_text", "olmo_hybrid", "qwen3_5_text"})
"""model_type of those that have more elements than the same sizes of such a decoder."""
_SCORE_BYTES = {
    "gemma2": 8, "granite_swa": 8, "granitemoe_swa": 8, "nemotron": 6, "stablelm": 6, "vaultgemma": 8,
}  # fmt: skip
"""model_type of those that HFEngine computes in padded rows -> most bytes that autograd saves of a score."""

OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OF_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
"""A dense layer's, which may have adapters; a layer of experts has no such."""


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
    shared_dim: int = 0  # F of what each layer of experts has for all tokens
    score_bytes: int = 0  # saved of each attention score, where HFEngine computes padded rows

    @staticmethod
    def of(hf: Mapping[str, Any]) -> "ModelShape":
        """hf: the contents of config.json. Raises ConfigError where it names no such decoder."""
        try:
            dim, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
            experts, model_type = num_experts(hf), str(hf.get("model_type", ""))
            odd = [key for key in hf if _is_of_another(key, hf[key])]
            if odd or model_type in UNLIKE:
                raise TypeError(f"{odd[0] if odd else model_type} is of another decoder")
            expert_dim = hf.get("moe_intermediate_size") or (hf["intermediate_size"] if experts else 0)
            num_shared = hf.get("n_shared_experts") or hf.get("num_shared_experts") or 0
            dense = {*(hf.get("mlp_only_layers") or []), *range(hf.get("first_k_dense_replace") or 0)}
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
                tied=bool(hf.get("tie_word_embeddings", model_type in TIED)),
                qk_norm=model_type.startswith("qwen3"),
                num_moe_layers=in_turn if experts else 0,
                num_experts=experts,
                top_k=hf.get("num_experts_per_tok") or 0,
                expert_dim=expert_dim,
                shared_dim=hf.get("shared_expert_intermediate_size")
                or hf.get("shared_intermediate_size")
                or num_shared * expert_dim,
                score_bytes=_SCORE_BYTES.get(model_type, 0),
            )
            if wrong := [value for value in vars(shape).values() if not isinstance(value, int)]:
                raise TypeError(f"{wrong[0]!r} is no whole number")
            return shape
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(f"config.json does not give the sizes of a decoder: {error!r}") from error

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of the largest layer."""
        dense = 3 * self.dim * self.hidden_dim
        return self._attention + max(self._experts, dense * (self.num_moe_layers < self.num_layers))

    @property
    def _attention(self) -> int:
        return self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def _experts(self) -> int:
        """Elements of a layer's experts, with their router and what all tokens go through."""
        if not self.num_moe_layers:
            return 0
        return self.expert_elements + self.num_experts * self.dim + 3 * self.dim * self.shared_dim

    @property
    def expert_elements(self) -> int:
        """Of a layer's experts alone."""
        return self.num_experts * 3 * self.dim * self.expert_dim

    @property
    def matrices(self) -> int:
        """Elements of all matrices, the embeddings and the head among them."""
        dense = 3 * self.dim * self.hidden_dim * (self.num_layers - self.num_moe_layers)
        experts = self.num_moe_layers * self._experts
        return self.num_layers * self._attention + dense + experts + self.vocabulary

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

    def may_have(self, num_elements: int) -> bool:
        """Whether files with so many elements are of this model, to a twentieth, or of a smaller one: tied
        embeddings may be in them twice, and biases are not counted here."""
        twice = self.vocab_size * self.dim if self.tied else 0
        return num_elements <= 1.05 * (self.num_parameters + twice)

    def adapter_elements(self, lora: LoRA) -> int:
        """Of a LoRA adapter. Experts have none."""
        q, k = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sides = {
            "q_proj": (self.dim, q), "k_proj": (self.dim, k), "v_proj": (self.dim, k),
            "o_proj": (q, self.dim), "gate_proj": (self.dim, self.hidden_dim),
            "up_proj": (self.dim, self.hidden_dim), "down_proj": (self.hidden_dim, self.dim),
        }  # fmt: skip
        layers = {t: self.num_layers - self.num_moe_layers * (t in OF_FEED_FORWARD) for t in sides}
        return lora.rank * sum(layers[t] * sum(sides[t]) for t in lora.targets if t in sides)

    def kv_bytes(self, dtype: str, tensor_parallel: int = 1) -> float:
        """Of one token in the key-value cache of a rank, which has at least one head."""
        heads = max(1, self.num_kv_heads / tensor_parallel)
        return 2 * self.num_layers * heads * self.head_dim * BYTES[dtype]


def _is_of_another(key: str, value: Any) -> bool:
    """Whether a key of config.json says that its layers are not those which are counted here."""
    if key in ("kv_lora_rank", "ffn_config"):  # compressed keys; experts of DBRX
        return bool(value)
    return key not in COUNTS and key.endswith("num_experts") and bool(value)
