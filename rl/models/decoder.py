"""torchtitan's Qwen3 and Llama3 decoders, ending in a head that computes logprobs of target tokens.

B batch (1), T tokens of a row (those of this process under context parallelism), D hidden size, M target
tokens, V vocabulary, E experts, R routed tokens, F hidden size of an expert.

Two choices keep every parameter equal, row for row, to its Hugging Face tensor, so that a shard of one is a
shard of the other and nothing is gathered or permuted when weights move: q, k and v stay separate, and Llama
uses the rotate-half form of RoPE (torchtitan's own Llama3 takes the complex form, whose q and k rows are
permuted).
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import rl.models.platform  # noqa: F401  sets torchtitan's device first
from rl.models.attention import PackedDocuments
from rl.models.target_logprobs import target_logprobs, target_values

from torchtitan.distributed import ParallelDims
from torchtitan.models.common import CosSinRoPE, Linear
from torchtitan.models.common.attention import VarlenMetadata
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.sharding import ShardingConfig


class LogprobHead(Linear):
    """The lm_head, asked for logprobs of target tokens instead of logits of all tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, h_BTD: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        """predictors [M] indices into T, targets [M] -> logprobs [M] and entropy [M].

        In fp32 nats. The hidden state at a token predicts the next one. Without targets: the logits [M, V].
        """
        mesh = None
        if isinstance(h_BTD, DTensor):
            mesh, h_BTD = h_BTD.device_mesh, h_BTD.to_local(grad_placements=[Replicate()])
        h_MD = h_BTD[0].index_select(0, predictors)
        return target_logprobs(partial(self._logits, mesh), self.out_features, h_MD, targets)

    def _logits(self, mesh: Any, h: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., V]; under tensor parallelism the vocabulary's shards are gathered."""
        if mesh is None:
            return F.linear(h, self.weight)
        h = DTensor.from_local(h, mesh, [Replicate()], run_check=False)
        logits = cast(DTensor, F.linear(h, self.weight)).redistribute(placements=[Replicate()])
        return logits.to_local(grad_placements=[Replicate()])


class ValueHead(Linear):
    """One number for each target token: the value before it. Takes the lm_head's place and arguments."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, h_BTD: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor | None) -> Any:
        """-> (values [M] with gradient, zeros [M]), fp32; without targets the values [M, 1]."""
        h_TD = (h_BTD.to_local(grad_placements=[Replicate()]) if isinstance(h_BTD, DTensor) else h_BTD)[0]
        weight = self.weight
        if isinstance(weight, DTensor):  # whole on every rank, each of which computes the same
            weight = weight.to_local(grad_placements=[Replicate()])
        return target_values(F.linear(h_TD.index_select(0, predictors).float(), weight.float()), targets)


def _forward_to_targets(
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
    """Tensor parallelism distributes each module's own parameter: tied ones are tied again before FSDP."""
    Decoder.parallelize(self, dims)
    if self.enable_weight_tying:
        self.tok_embeddings.weight = self.lm_head.weight
    for layer in self.layers.values():
        if getattr(layer, "moe_enabled", False):
            layer.moe.routed_experts.register_forward_pre_hook(_gather_for_experts)


def _share_head(config: Decoder.Config) -> None:
    # The head handles its own activations; only its weight follows torchtitan's tensor-parallel plan,
    # and a value head's is whole.
    like = config.norm if isinstance(config.lm_head, ValueHead.Config) else config.tok_embeddings
    weight = like.sharding_config.state_shardings["weight"]
    config.lm_head.sharding_config = ShardingConfig(state_shardings={"weight": weight})


class Experts(GroupedExperts):
    """torchtitan's experts compute in bf16 whatever they are given; here fp32 stays fp32."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        if x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        w1_EFD, w2_EDF, w3_EFD = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        outputs = [
            F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
            for x, w1, w2, w3 in zip(rows, w1_EFD, w2_EDF, w3_EFD, strict=True)
        ]
        return torch.cat(outputs)


def _gather_once_for_each(moe: MoE.Config) -> None:
    """Under tensor parallelism let router and experts each gather the sequence.

    What MoE gathers for both, it gathers asynchronously, and torch 2.13 then loses the gradient that comes
    back from the experts' local region.
    """
    sharded = moe.sharding_config.in_src_shardings["x_BLD"]
    moe.sharding_config = replace(moe.sharding_config, in_dst_shardings={"x_BLD": sharded})
    gate = moe.router.gate
    gate.sharding_config = replace(gate.sharding_config, in_src_shardings={"input": sharded})


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

    forward = _forward_to_targets
    parallelize = _parallelize


class Llama3Policy(Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Llama3Model.Config.update_from_config(self, config=config, **kwargs)
            _share_head(self)

    forward = _forward_to_targets
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
