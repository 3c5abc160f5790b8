"""HFEngine: any architecture of transformers' AutoModelForCausalLM, under FSDP2.

Sequences are packed where the architecture's attention can be told of it; where it cannot (state-space layers, soft-capped
attention, windows that are in the mask alone), they are padded rows: of n sequences, n times the longest, whatever the packed
row's length. Which of the two is right, and that logits are computed as transformers computes them, is checked against
transformers' own forward when the engine is built.
B rows (1 where packed), T tokens of a row, D hidden size, M target tokens, V vocabulary, N heads, H head size.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.modeling_utils import AttentionInterface

from rl.errors import ConfigError, RunError
from rl.models import hf
from rl.models.activation_checkpointing import CHECKPOINTING
from rl.models.attention import PackedDocuments, document_rows, pack_documents
from rl.models.engine import Engine
from rl.models.lora import Site, freeze
from rl.models.platform import DEVICE_TYPE, sum_gradients_over_ranks
from rl.models.scoring import score, value_scores
from rl.types import MicroBatch
from rl.weight_sync.manifest import LocalShard

_PACKED = "rl_packed"
_CHECK_LENGTHS = (37, 14)


class HFEngine(Engine):
    """See Engine for the contract. Layouts: replicate x shard."""

    def _build(self) -> nn.Module:
        config, layout = self.config, self.config.layout
        if layout.procs_per_row > 1:
            raise ConfigError(f"HFEngine knows replicate and shard alone, not {layout}; use TitanEngine, or more of layout.shard")
        for name in ("float8", "compile"):
            if getattr(config, name):
                raise ConfigError(f"HFEngine has no {name}; use TitanEngine, or set {name} to False")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed or 0)
            scorer = _Scorer(self._causal_lm(), with_value_head=config.head == "value")
        if config.adapters:
            freeze(scorer, self._dtype)
            layers = [(n, m) for n, layer in scorer.layers().items() for n, m in _named_linears(n, layer)]
            self._sites = [Site(n.removeprefix("lm."), m) for n, m in layers]
        if (policy := CHECKPOINTING[config.activation_checkpointing]()) is not None:
            scorer.checkpoint_layers(policy.build(dump_folder=""))
        mesh = init_device_mesh(DEVICE_TYPE, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))
        mesh = mesh if layout.replicate > 1 else mesh["shard"]
        precision = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in scorer.layers().values():
            fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=layout.shard > 1)
        fully_shard(scorer, mesh=mesh, mp_policy=precision)
        sum_gradients_over_ranks(scorer, layout.data_parallel)
        scorer.to(self.device)
        self._model = scorer
        self._check_against_transformers()
        return scorer

    def _causal_lm(self) -> transformers.PreTrainedModel:
        """On the host, in fp32. Every rank holds the whole model until it is sharded."""
        try:
            if self.config.seed is not None:
                hf_config = transformers.AutoConfig.from_pretrained(self._model_dir)
                return transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
            hf.check_weights(self._model_dir)
            return transformers.AutoModelForCausalLM.from_pretrained(self._model_dir, dtype=torch.float32)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"transformers has no causal language model for {self._model_dir}: {error}") from error

    def _name(self, parameter: str) -> str:
        return super()._name(parameter).removeprefix("lm.")

    def _run(self, micro: MicroBatch, with_targets: bool) -> Any:
        targets = micro.tokens[micro.targets] if with_targets else None
        return self._forward(micro.tokens, micro.positions, micro.targets - 1, targets)

    def _forward(self, tokens: np.ndarray, positions: np.ndarray, predictors: np.ndarray, targets: np.ndarray | None) -> Any:
        """tokens, positions: [L] packed; predictors: [M] indices into L."""
        documents = None
        if self._model.packed:
            documents = pack_documents(positions, self.device)
            tokens, positions = tokens[None], positions[None]
        else:
            tokens, positions, at = document_rows(tokens, positions)
            predictors = at[predictors]
        return self._model(
            self._tensor(tokens),
            self._tensor(positions),
            documents,
            self._tensor(predictors),
            None if targets is None else self._tensor(targets),
        )

    @torch.no_grad()
    def _check_against_transformers(self) -> None:
        """Choose packed or padded rows, whichever gives transformers' own logits. Raises ConfigError where neither does."""
        self._model.eval()
        generator = np.random.default_rng(0)
        rows = [generator.integers(0, self._model.vocab_size, n) for n in _CHECK_LENGTHS]
        expected = torch.cat([self._model.reference(self._tensor(row[None]))[0] for row in rows])
        positions = np.concatenate([np.arange(n) for n in _CHECK_LENGTHS])
        limit = (1e-3 if self._dtype == torch.float32 else 0.1) * expected.float().std()
        differences = {}
        for packed in (True, False):
            self._model.use(packed)
            try:
                if packed and (reason := self._model.hides_windows()):
                    raise NotImplementedError(reason)
                logits = self._forward(np.concatenate(rows), positions, np.arange(len(positions)), None)
            except NotImplementedError as reason:
                differences[packed] = str(reason)
                continue
            difference = (logits - expected).abs().max()
            if difference < limit:
                self._reshard()
                return
            differences[packed] = f"{difference.item():.1e}"
        raise ConfigError(
            f"HFEngine does not compute what transformers computes for {type(self._model.lm).__name__}: logits differ by "
            f"{differences[True]} packed and {differences[False]} in padded rows; use an architecture that TitanEngine has"
        )

    def export(self, adapter: str | None = None, *, merged: bool = False) -> Iterator[LocalShard]:
        if adapter is None or merged:
            self._check_names()
        return super().export(adapter, merged=merged)

    def _write_hf(self, out_dir: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """By transformers, which gives tensors their names on disk. Rank 0 holds the whole model meanwhile."""
        self._model.lm.save_pretrained(out_dir, state_dict=dict(tensors))
        hf.copy_companions(self._model_dir, out_dir, self._dtype)

    def _check_names(self) -> None:
        """transformers renames and fuses some architectures' tensors while loading; what is not on disk cannot be exported."""
        if self.config.seed is None and (unknown := sorted(self._tensors.keys() - hf.tensor_names(self._model_dir))):
            raise RunError(
                f"transformers holds {len(unknown)} tensors under names of its own, such as {unknown[0]}: they cannot be exported"
            )


def _named_linears(prefix: str, layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(f"{prefix}.{n}", m) for n, m in layer.named_modules() if isinstance(m, nn.Linear)]


class _Scorer(nn.Module):
    """A causal language model whose forward scores chosen tokens: FSDP's root, so that its own parameters are gathered."""

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
            raise ConfigError(f"{type(self.lm).__name__} has no list of layers to shard; use an architecture that TitanEngine has")
        name, longest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
        return {f"{name}.{i}": layer for i, layer in enumerate(longest)}

    def checkpoint_layers(self, policy: Any) -> None:
        holder = self.get_submodule(next(iter(self.layers())).rsplit(".", 2)[0])
        if not hasattr(holder, "layers"):
            raise ConfigError(f"activation checkpointing does not find the layers of {type(self.lm).__name__}; set it to 'none'")
        policy.apply(holder)

    def use(self, packed: bool) -> None:
        self.packed = packed
        self.lm.set_attn_implementation(_PACKED if packed else "eager")

    def hides_windows(self) -> str:
        """Why the config's sliding windows do not reach attention as `sliding_window`, as some architectures put them into the
        mask alone, which packing replaces; empty where they do. The check's rows are shorter than most windows."""
        config = self.lm.config.get_text_config()
        types = list(getattr(config, "layer_types", None) or [])
        if getattr(config, "attention_chunk_size", None) or set(types) - {"full_attention", "sliding_attention"}:
            return "its layers do not all attend to the whole sequence or to a window of it"
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        expected = types.count("sliding_attention") if types else config.num_hidden_layers if window else 0
        seen: list[int | None] = []
        tokens = torch.zeros(1, 1, dtype=torch.long, device=next(self.parameters()).device)
        documents = pack_documents(np.zeros(1, int), tokens.device)
        self(tokens, tokens, documents, tokens[0], None, seen)
        got = sum(window is not None for window in seen)
        return "" if got == expected else f"{expected} of its layers have a sliding window, but {got} tell attention"

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
        windows: list[int | None] | None = None,  # takes the sliding window of each layer's attention, for inspection
    ) -> Any:
        if predictors is None:
            return self.lm(input_ids=tokens, use_cache=False).logits
        packing = {"packed_documents": documents, "packed_windows": windows} if documents is not None else {}
        h_BTD = self.lm.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **packing)[0]
        h_MD = h_BTD.flatten(0, 1).index_select(0, predictors)
        if self.value_head is not None and targets is not None:
            return value_scores(F.linear(h_MD.float(), self.value_head.weight.float()), targets)
        return score(self._logits, self.vocab_size, h_MD, targets)

    def _logits(self, h_MD: torch.Tensor) -> torch.Tensor:
        return self._after_head(self.lm.get_output_embeddings()(h_MD))


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
    """An attention function of transformers' that keeps packed documents apart."""
    if packed_documents is None:
        raise NotImplementedError("its layers do not hand packing on to attention")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"its attention uses {name}")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise NotImplementedError("its attention is not plainly causal")
    if packed_windows is not None:
        packed_windows.append(sliding_window)
    outputs = []
    for index, valid in zip(packed_documents.queries, packed_documents.valid, strict=True):
        q, k, v = (t[0].index_select(1, index.flatten()).unflatten(1, index.shape).transpose(0, 1) for t in (query, key, value))
        mask = None
        if sliding_window is not None and index.shape[1] > sliding_window:
            ones = torch.ones(index.shape[1], index.shape[1], dtype=torch.bool, device=q.device)
            mask = ones.tril() & ~ones.tril(-sliding_window)
        if mask is not None and q.shape[1] != k.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1)[valid])
    return torch.cat(outputs).index_select(0, packed_documents.restore).unsqueeze(0), None


AttentionInterface.register(_PACKED, _packed_attention)
