"""torchtitan's Qwen3 and Llama3 decoders, built from a Hugging Face config.json and ending in a head that scores tokens.

B batch (1), T tokens of a row (those of this process under context parallelism), D hidden size, M target tokens, V vocabulary,
E experts, R routed tokens, F hidden size of an expert.

Two choices keep every parameter equal, row for row, to its Hugging Face tensor, so that a shard of one is a shard of the
other and nothing is gathered or permuted when weights move: q, k and v stay separate, and Llama uses the rotate-half
form of RoPE (torchtitan's own Llama3 takes the complex form, whose q and k rows are permuted).
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import rl.models.platform  # noqa: F401  sets torchtitan's device first
from rl.models.attention import PackedDocuments, PackedSDPA
from rl.models.hf import check_supported, rope_parameters
from rl.models.scoring import score, value_scores

from torchtitan.distributed import ParallelDims
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingConfig


class ScoringHead(Linear):
    """The lm_head, asked for logprobs of chosen tokens instead of logits of all of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, h_BTD: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """predictors: [M] indices into T; targets: [M] -> logprobs [M] with gradient and entropy [M] without, fp32 nats.

        The hidden state at a token predicts the next one. Without targets: the logits [M, V].
        """
        mesh = h_BTD.device_mesh if isinstance(h_BTD, DTensor) else None
        h_TD = (h_BTD.to_local(grad_placements=[Replicate()]) if mesh else h_BTD)[0]
        return score(partial(self._logits, mesh), self.out_features, h_TD.index_select(0, predictors), targets)

    def _logits(self, mesh: Any, h: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]; under tensor parallelism the vocabulary's shards are gathered."""
        if mesh is None:
            return F.linear(h, self.weight)
        h = DTensor.from_local(h, mesh, [Replicate()], run_check=False)
        return F.linear(h, self.weight).redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


class ValueHead(Linear):
    """One number for each chosen token: the value before it. Takes the lm_head's place and arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, h_BTD: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor | None) -> Any:
        """-> (values [M] with gradient, zeros [M]), fp32; without targets the values [M, 1]."""
        h_TD = (h_BTD.to_local(grad_placements=[Replicate()]) if isinstance(h_BTD, DTensor) else h_BTD)[0]
        weight = self.weight
        if isinstance(weight, DTensor):  # whole on every rank, each of which computes the same
            weight = weight.to_local(grad_placements=[Replicate()])
        return value_scores(F.linear(h_TD.index_select(0, predictors).float(), weight.float()), targets)


def _scoring_forward(
    self: Decoder,
    tokens: torch.Tensor,  # [1, T]
    positions: torch.Tensor,  # [1, T], 0 where a sequence starts
    documents: PackedDocuments | VarlenMetadata,
    predictors: torch.Tensor,  # [M] indices into T
    targets: torch.Tensor | None,  # [M]
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    h_BTD = self.tok_embeddings(tokens)
    for layer in self.layers.values():
        h_BTD = layer(h_BTD, documents, positions)
    return self.lm_head(self.norm(h_BTD), predictors, targets)


def _parallelize(self: Decoder, dims: ParallelDims) -> None:
    """Tensor parallelism distributes each module's own parameter: tied ones are tied again before FSDP takes hold of them."""
    Decoder.parallelize(self, dims)
    if self.enable_weight_tying:
        self.tok_embeddings.weight = self.lm_head.weight
    for layer in self.layers.values():
        if getattr(layer, "moe_enabled", False):
            layer.moe.routed_experts.register_forward_pre_hook(_gather_for_experts)


def _share_head(config: Decoder.Config) -> None:
    # The head handles its own activations; only its weight follows torchtitan's tensor-parallel plan, and a value head's is whole.
    like = config.norm if isinstance(config.lm_head, ValueHead.Config) else config.tok_embeddings
    config.lm_head.sharding_config = ShardingConfig(state_shardings={"weight": like.sharding_config.state_shardings["weight"]})


class Experts(GroupedExperts):
    """torchtitan's experts compute in bf16 whatever they are given; here fp32 stays fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        if x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        w1_EFD, w2_EDF, w3_EFD = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        outputs = [
            F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2) for x, w1, w2, w3 in zip(rows, w1_EFD, w2_EDF, w3_EFD, strict=True)
        ]
        return torch.cat(outputs)


def _gather_once_for_each(moe: MoE.Config) -> None:
    """Under tensor parallelism let router and experts each gather the sequence, instead of sharing what MoE gathers.

    MoE gathers it asynchronously, and torch 2.13 loses the gradient that comes back from the experts' local region.
    """
    sharded = moe.sharding_config.in_src_shardings["x_BLD"]
    moe.sharding_config = replace(moe.sharding_config, in_dst_shardings={"x_BLD": sharded})
    moe.router.gate.sharding_config = replace(moe.router.gate.sharding_config, in_src_shardings={"input": sharded})


def _gather_for_experts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x_BLD, *routing = args
    return (x_BLD.redistribute(placements=[Replicate()]) if isinstance(x_BLD, DTensor) else x_BLD, *routing)


class Qwen3Policy(Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            _share_head(self)
            for layer in self.layers:
                if layer.moe is not None:
                    _gather_once_for_each(layer.moe)

    forward = _scoring_forward
    parallelize = _parallelize


class Llama3Policy(Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Llama3Model.Config.update_from_config(self, config=config, **kwargs)
            _share_head(self)

    forward = _scoring_forward
    parallelize = _parallelize


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


def model_spec(hf: dict[str, Any], *, packed_sdpa: bool, head: Literal["tokens", "value"] = "tokens") -> ModelSpec:
    """hf: the contents of config.json. `packed_sdpa` chooses PackedSDPA over torchtitan's varlen attention.

    Raises ConfigError as `check_supported` does.
    """
    check_supported(hf)
    is_llama = hf["architectures"][0] == "LlamaForCausalLM"
    return ModelSpec(
        name="llama3" if is_llama else "qwen3",
        flavor="from_hf",
        model=_decoder_config(hf, is_llama, PackedSDPA.Config() if packed_sdpa else VarlenAttention.Config(), head),
        parallelize_fn=parallelize_llama if is_llama else parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,  # torchtitan's hook moves biases of experts, which Hugging Face's models do not have
        state_dict_adapter=None,
    )


def _decoder_config(hf: dict[str, Any], is_llama: bool, attention: Any, head: str) -> Decoder.Config:
    dim, vocab_size = hf["hidden_size"], hf["vocab_size"]
    head_dim = hf.get("head_dim") or dim // hf["num_attention_heads"]
    normal = _normal(hf)
    tied = hf.get("tie_word_embeddings", False) and head == "tokens"
    lm_head = ScoringHead.Config(in_features=dim, out_features=vocab_size, param_init=normal)
    if head == "value":
        lm_head = ValueHead.Config(in_features=dim, out_features=1, param_init={"weight": nn.init.zeros_})
    block = Llama3TransformerBlock if is_llama else Qwen3TransformerBlock
    layers = [
        block.Config(
            attention_norm=_norm(hf, dim),
            ffn_norm=_norm(hf, dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=hf["num_attention_heads"],
                n_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
                head_dim=head_dim,
                wqkv_param_init=normal,
                wo_param_init=normal,
                inner_attention=attention,
                rope=_rope(hf, head_dim),
                qk_norm=None if is_llama else _norm(hf, head_dim),
            ),
            **_feed_forward(hf, layer),
        )
        for layer in range(hf["num_hidden_layers"])
    ]
    return (Llama3Policy if is_llama else Qwen3Policy).Config(
        dim=dim,
        vocab_size=vocab_size,
        norm=_norm(hf, dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init={"weight": skip_param_init} if tied else normal,
        ),
        lm_head=lm_head,
        layers=layers,
    )


def _normal(hf: dict[str, Any]) -> dict[str, Any]:
    return {"weight": partial(nn.init.normal_, std=hf.get("initializer_range", 0.02))}


def _norm(hf: dict[str, Any], size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=hf["rms_norm_eps"], param_init={"weight": nn.init.ones_})


def _feed_forward(hf: dict[str, Any], layer: int) -> dict[str, Any]:
    """A dense or a sparse feed-forward part, by the rules of Qwen3-MoE's config.json."""
    dim, normal = hf["hidden_size"], _normal(hf)
    num_experts = hf.get("num_experts") or hf.get("num_local_experts")  # transformers 5 writes the latter
    sparse = num_experts and layer not in hf.get("mlp_only_layers", []) and (layer + 1) % hf.get("decoder_sparse_step", 1) == 0
    if not sparse:
        return {"feed_forward": make_ffn_config(dim=dim, hidden_dim=hf["intermediate_size"], w1_param_init=normal, w2w3_param_init=normal)}
    top_k, hidden_dim = hf["num_experts_per_tok"], hf["moe_intermediate_size"]
    experts = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal["weight"])
    return {
        "moe": make_moe_config(
            num_experts=num_experts,
            router=make_router_config(
                dim=dim,
                num_experts=num_experts,
                gate_param_init=normal,
                top_k=top_k,
                score_func="softmax",
                route_norm=hf.get("norm_topk_prob", False),
            ),
            routed_experts=RoutedExperts.Config(
                inner_experts=Experts.Config(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts, param_init=experts),
                token_dispatcher=make_token_dispatcher_config(num_experts=num_experts, top_k=top_k, comm_backend="standard"),
            ),
            load_balance_coeff=None,
        )
    }


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
