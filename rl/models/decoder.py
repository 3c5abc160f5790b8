"""torchtitan's Qwen3 and Llama3 decoders, built from a Hugging Face config.json and ending in a head that scores tokens.

B batch (1), T row length, D hidden size, M scored tokens, V vocabulary.

Two choices keep every parameter equal, row for row, to its Hugging Face tensor, so that a shard of one is a shard of the
other and nothing is gathered or permuted when weights move: q, k and v stay separate, and Llama uses the rotate-half
form of RoPE (torchtitan's own Llama3 takes the complex form, whose q and k rows are permuted).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import rl.models.platform  # noqa: F401  sets torchtitan's device first
from rl.loss.logprobs import token_entropy, token_logprobs
from rl.models.attention import PackedDocuments, PackedSDPA
from rl.models.hf import check_supported, rope_parameters

from torchtitan.distributed import ParallelDims
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingConfig

_CHUNK_ELEMENTS = 1 << 26
"""Logits held at a time, in elements (256 MiB in fp32); beyond it they are recomputed chunk by chunk in backward."""


class ScoringHead(Linear):
    """The lm_head, asked for logprobs of chosen tokens instead of logits of all of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, h_BTD: torch.Tensor, scored: torch.Tensor, targets: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """scored, targets: [M] -> logprobs [M] with gradient and entropy [M] without, fp32 nats.

        The hidden state at `scored - 1` predicts the token at `scored`. Without targets: the logits [M, V].
        """
        mesh = h_BTD.device_mesh if isinstance(h_BTD, DTensor) else None
        h_TD = (h_BTD.to_local(grad_placements=[Replicate()]) if mesh else h_BTD)[0]
        h_MD = h_TD.index_select(0, scored - 1)
        if targets is None:
            return self._logits(mesh, h_MD)
        score = partial(self._score, mesh)
        num_chunks = max(1, math.ceil(h_MD.shape[0] * self.out_features / _CHUNK_ELEMENTS))
        if num_chunks == 1:
            return score(h_MD, targets)
        chunks = zip(h_MD.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
        logprobs, entropy = zip(*(checkpoint(score, h, t, use_reentrant=False) for h, t in chunks), strict=True)
        return torch.cat(logprobs), torch.cat(entropy)

    def _score(self, mesh: Any, h_MD: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_MV = self._logits(mesh, h_MD)
        return token_logprobs(logits_MV, targets), token_entropy(logits_MV)

    def _logits(self, mesh: Any, h: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]; under tensor parallelism the vocabulary's shards are gathered."""
        if mesh is None:
            return F.linear(h, self.weight)
        h = DTensor.from_local(h, mesh, [Replicate()], run_check=False)
        return F.linear(h, self.weight).redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def _scoring_forward(
    self: Decoder,
    tokens: torch.Tensor,  # [1, T]
    positions: torch.Tensor,  # [1, T], 0 where a sequence starts
    documents: PackedDocuments | VarlenMetadata,
    scored: torch.Tensor,  # [M]
    targets: torch.Tensor | None,  # [M]
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    h_BTD = self.tok_embeddings(tokens)
    for layer in self.layers.values():
        h_BTD = layer(h_BTD, documents, positions)
    return self.lm_head(self.norm(h_BTD), scored, targets)


def _parallelize_tied(self: Decoder, dims: ParallelDims) -> None:
    """Tensor parallelism distributes each module's own parameter: tie the two again before FSDP takes hold of them."""
    Decoder.parallelize(self, dims)
    if self.enable_weight_tying:
        self.tok_embeddings.weight = self.lm_head.weight


def _share_head(config: Decoder.Config) -> None:
    # The head handles its own activations; only its weight follows torchtitan's tensor-parallel plan.
    config.lm_head.sharding_config = ShardingConfig(
        state_shardings={"weight": config.tok_embeddings.sharding_config.state_shardings["weight"]}
    )


class Qwen3Policy(Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            _share_head(self)

    forward = _scoring_forward
    parallelize = _parallelize_tied


class Llama3Policy(Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Llama3Model.Config.update_from_config(self, config=config, **kwargs)
            _share_head(self)

    forward = _scoring_forward
    parallelize = _parallelize_tied


class Llama3RoPE(CosSinRoPE):
    """CosSinRoPE with the frequency scaling of Llama 3.1 (rope_type "llama3")."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        cfg = self.config
        freqs = 1.0 / cfg.theta ** (torch.arange(0, cfg.dim, 2).float() / cfg.dim)
        if cfg.scaling == "llama":
            turns = cfg.original_max_position_embeddings * freqs / (2 * math.pi)
            smooth = (turns - cfg.low_freq_factor) / (cfg.high_freq_factor - cfg.low_freq_factor)
            smooth = smooth.clamp(0, 1)
            freqs = smooth * freqs + (1 - smooth) * freqs / cfg.scaling_factor
        angles = torch.outer(torch.arange(cfg.max_seq_len).float(), freqs)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def model_spec(hf: dict[str, Any], *, packed_sdpa: bool) -> ModelSpec:
    """hf: the contents of config.json. `packed_sdpa` chooses PackedSDPA over torchtitan's varlen attention.

    Raises ConfigError as `check_supported` does.
    """
    check_supported(hf)
    is_qwen3 = hf["architectures"][0] == "Qwen3ForCausalLM"
    config = _decoder_config(hf, is_qwen3, VarlenAttention.Config() if not packed_sdpa else PackedSDPA.Config())
    return ModelSpec(
        name="qwen3" if is_qwen3 else "llama3",
        flavor="from_hf",
        model=config,
        parallelize_fn=parallelize_qwen3 if is_qwen3 else parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def _decoder_config(hf: dict[str, Any], is_qwen3: bool, attention: VarlenAttention.Config) -> Decoder.Config:
    dim, num_heads, vocab_size = hf["hidden_size"], hf["num_attention_heads"], hf["vocab_size"]
    head_dim = hf.get("head_dim") or dim // num_heads
    normal = {"weight": partial(nn.init.normal_, std=hf.get("initializer_range", 0.02))}
    tied = hf.get("tie_word_embeddings", False)

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init={"weight": nn.init.ones_})

    block = Qwen3TransformerBlock if is_qwen3 else Llama3TransformerBlock
    layers = [
        block.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=num_heads,
                n_kv_heads=hf.get("num_key_value_heads") or num_heads,
                head_dim=head_dim,
                wqkv_param_init=normal,
                wo_param_init=normal,
                inner_attention=attention,
                rope=_rope(hf, head_dim),
                qk_norm=norm(head_dim) if is_qwen3 else None,
            ),
            feed_forward=make_ffn_config(dim=dim, hidden_dim=hf["intermediate_size"], w1_param_init=normal, w2w3_param_init=normal),
        )
        for _ in range(hf["num_hidden_layers"])
    ]
    return (Qwen3Policy if is_qwen3 else Llama3Policy).Config(
        dim=dim,
        vocab_size=vocab_size,
        norm=norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else normal,
        ),
        lm_head=ScoringHead.Config(in_features=dim, out_features=vocab_size, param_init=normal),
        layers=layers,
    )


def _rope(hf: dict[str, Any], head_dim: int) -> CosSinRoPE.Config:
    rope = rope_parameters(hf)
    common = {"dim": head_dim, "max_seq_len": hf["max_position_embeddings"], "theta": rope["rope_theta"]}
    if rope["rope_type"] == "default":
        return CosSinRoPE.Config(**common)
    return Llama3RoPE.Config(
        **common,
        scaling="llama",
        scaling_factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )
