"""HFEngine: any architecture of transformers' AutoModelForCausalLM, under FSDP2.

Sequences are packed, and leading tokens that they share computed once, where the architecture's attention
can be told of it. Where it cannot (state-space layers, soft-capped attention, windows that are only in the
mask), they are padded rows: n sequences cost n times the longest, whatever the packed row's length. When the
engine is built, its logits are compared with those of transformers' own forward: that decides how it computes
rows, and whether the model can be used.
L tokens of a packed row, M target tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rl.errors import ConfigError, RunError
from rl.micro_batch import MicroBatch
from rl.models import hf, hf_checks
from rl.models.activation_checkpointing import CHECKPOINTING
from rl.models.attention import pack_documents
from rl.models.engine import Engine
from rl.models.hf_model import HFModel
from rl.models.lora import Site, freeze
from rl.models.platform import DEVICE_TYPE, fail_together, reshard, sum_gradients_over_ranks
from rl.weight_sync.manifest import LocalShard

_ROWS = _TREES, _PACKED, _PADDED = "packed rows that share prefixes", "packed rows", "padded rows"
_CHECK_LENGTHS = (37, 14, 25, 6)
_CHECK_SHARED = (0, 9, 11, 0)


class HFEngine(Engine):
    """See Engine for the contract. Layouts: replicate x shard."""

    _model: HFModel

    def _build(self) -> nn.Module:
        config, layout = self.config, self.config.layout
        if layout.procs_per_row > 1:
            raise ConfigError(
                f"HFEngine has only replicate and shard, not {layout}; "
                f"use TitanEngine, or more of layout.shard"
            )
        for name in ("float8", "compile"):
            if getattr(config, name):
                raise ConfigError(f"HFEngine has no {name}; use TitanEngine, or set {name} to False")
        hf_checks.check_rope_is_fixed(self._hf_config, self.max_seq_len)
        self._model = model = self._read_on_first_rank()
        if config.adapters:
            freeze(model, self._dtype)
            layers = [(n, m) for n, layer in model.layers().items() for n, m in _named_linears(n, layer)]
            self._sites = [Site(n.removeprefix("lm."), m) for n, m in layers]
        if (policy := CHECKPOINTING[config.activation_checkpointing]()) is not None:
            model.checkpoint_layers(policy.build(dump_folder=""))
        sizes = (layout.replicate, layout.shard)
        mesh = init_device_mesh(DEVICE_TYPE, sizes, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if layout.replicate > 1 else mesh["shard"]
        precision = MixedPrecisionPolicy(
            param_dtype=self._dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        whole = [t.detach() for t in (*model.parameters(), *model.buffers())]
        for layer in model.layers().values():
            fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=layout.shard > 1)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        sum_gradients_over_ranks(model, layout.data_parallel)
        if dist.get_world_size() == 1:
            model.to(self.device)
        else:
            self._take_from_first_rank(model, whole)
        self._check_dtype()
        return model

    def _read_on_first_rank(self) -> HFModel:
        """The whole model, on the host and checked; on other ranks its shapes alone. A collective."""
        model, failure = None, None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed or 0)
            try:
                if dist.get_rank() == 0:
                    model = self._model = self._hf_model(self._causal_lm())
                    self._check_against_transformers()
                else:
                    with torch.device("meta"):
                        model = self._hf_model(self._random_lm())
            except Exception as error:  # whatever transformers makes of a broken directory
                failure = error
        fail_together(failure)
        assert model is not None
        chosen = [model.packed, self._shares_prefixes]
        dist.broadcast_object_list(chosen, src=0)
        model.use(chosen[0])
        self._shares_prefixes = chosen[1]
        return model

    def _hf_model(self, lm: transformers.PreTrainedModel) -> HFModel:
        model = HFModel(lm, with_value_head=self.config.head == "value")
        if not self.config.dropout:
            model.remove_dropout()
        return model

    @torch.no_grad()
    def _take_from_first_rank(self, model: HFModel, whole: list[torch.Tensor]) -> None:
        """One tensor at a time, to the device. `whole`: what rank 0 read."""
        model.to_empty(device=self.device)
        for tensor, full in zip((*model.parameters(), *model.buffers()), whole, strict=True):
            full = (
                full.to(self.device) if dist.get_rank() == 0 else torch.empty_like(full, device=self.device)
            )
            dist.broadcast(full, src=0)
            if isinstance(tensor, DTensor):
                full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(full)

    @torch.no_grad()
    def _check_dtype(self) -> None:
        """Raises ConfigError where the architecture cannot compute in the dtype. A collective."""
        two = np.arange(2)
        try:
            self._forward(two, two, two, None)
        except RuntimeError as error:
            name = type(self._model.lm).__name__
            raise ConfigError(
                f"{name} does not compute in {self.config.dtype} ({' '.join(str(error).split()):.120}); "
                f"set dtype to float32"
            ) from error
        reshard(self._model)

    def _causal_lm(self) -> transformers.PreTrainedModel:
        """On the host, in fp32."""
        try:
            if self.config.seed is not None:
                return self._random_lm()
            hf.check_weights(self._model_dir)
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                self._model_dir, dtype=torch.float32, output_loading_info=True
            )
            self._check_loaded(model, loaded)
            return model
        except (ValueError, KeyError) as error:
            message = f"transformers has no causal language model for {self._model_dir}: {error}"
            raise ConfigError(message) from error

    def _random_lm(self) -> transformers.PreTrainedModel:
        hf_config = transformers.AutoConfig.from_pretrained(self._model_dir)
        return transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)

    def _check_loaded(self, model: transformers.PreTrainedModel, loaded: dict[str, Any]) -> None:
        """Raises ConfigError where transformers made a tensor up, or left one out."""
        names = hf.tensor_names(self._model_dir)
        if missing := sorted(loaded["missing_keys"]):
            raise ConfigError(
                f"model directory {self._model_dir} lacks {len(missing)} tensors that its config.json asks "
                f"for, such as {missing[0]}"
            )
        if unknown := set(loaded["unexpected_keys"]) - {hf.HEAD}:
            raise ConfigError(hf.no_place(self._model_dir, unknown))
        if model.config.get_text_config().tie_word_embeddings and hf.HEAD in names:
            hf.check_tied(self._model_dir, model.get_input_embeddings().weight.detach())

    def _name(self, parameter: str) -> str:
        return super()._name(parameter).removeprefix("lm.")

    def _run(self, micro: MicroBatch, with_targets: bool) -> Any:
        targets = micro.targets if with_targets else None
        return self._forward(micro.tokens, micro.positions, micro.predictors, targets)

    def _forward(
        self, tokens: np.ndarray, positions: np.ndarray, predictors: np.ndarray, targets: np.ndarray | None
    ) -> Any:
        """tokens, positions: [L] packed; predictors: [M] indices into L."""
        documents, device = None, next(self._model.parameters()).device
        if self._model.packed:
            documents = pack_documents(positions, device)
            tokens, positions = tokens[None], positions[None]
        else:
            tokens, positions, at = _document_rows(tokens, positions)
            predictors = at[predictors]

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        wanted = None if targets is None else tensor(targets)
        return self._model(tensor(tokens), tensor(positions), documents, tensor(predictors), wanted)

    @torch.no_grad()
    def _check_against_transformers(self) -> None:
        """Choose the cheapest rows that give transformers' own logits, and print which.

        In fp32 and on the host, before the model is sharded: in bf16 rounding would hide what is wrong.
        Raises ConfigError where none does.
        """
        self._model.eval()
        documents = self._check_documents()
        expected = [self._model.reference(torch.from_numpy(row[None]))[0] for row in documents]
        limit = 1e-3 * torch.cat(expected).std()
        # Of dropout each sequence has its own.
        shares = self.config.share_prefixes and not self.config.dropout
        wrong: dict[str, str] = {}
        for rows in _ROWS if shares else _ROWS[1:]:
            try:
                difference = self._difference(rows, documents, expected)
            except NotImplementedError as reason:
                wrong[rows] = str(reason)
                continue
            if difference < limit:
                self._shares_prefixes = rows == _TREES
                why = "".join(f" ({other}: {reason})" for other, reason in [*wrong.items()][-1:])
                print(f"HFEngine: {type(self._model.lm).__name__} computes {rows}{why}", flush=True)
                return
            wrong[rows] = f"{difference:.1e}"
        raise ConfigError(
            f"HFEngine does not compute what transformers computes for {type(self._model.lm).__name__}: "
            f"logits differ by {', '.join(f'{by} in {rows}' for rows, by in wrong.items())}; "
            f"use an architecture that TitanEngine has"
        )

    def _check_documents(self) -> list[np.ndarray]:
        """Of which the second goes on after tokens of the first, and the third after tokens of the second."""
        rng = np.random.default_rng(0)
        documents: list[np.ndarray] = []
        for length, shared in zip(_CHECK_LENGTHS, _CHECK_SHARED, strict=True):
            new = rng.integers(0, self._model.vocab_size, length - shared)
            documents.append(np.concatenate([documents[-1][:shared], new]) if shared else new)
        return documents

    def _difference(
        self, rows: str, documents: list[np.ndarray], expected: list[torch.Tensor]
    ) -> torch.Tensor:
        """Raises NotImplementedError where the model cannot compute such rows."""
        self._model.use(packed=rows != _PADDED)
        if self._model.packed and (reason := self._model.hides_windows()):
            raise NotImplementedError(reason)
        shared = _CHECK_SHARED if rows == _TREES else (0,) * len(documents)
        tokens = np.concatenate([row[k:] for row, k in zip(documents, shared, strict=True)])
        positions = np.concatenate([np.arange(k, len(row)) for row, k in zip(documents, shared, strict=True)])
        logits = self._forward(tokens, positions, np.arange(len(tokens)), None)
        own = torch.cat([logits[k:] for logits, k in zip(expected, shared, strict=True)])
        return (logits - own).abs().max()

    def export(self, adapter: str | None = None, *, merged: bool = False) -> Iterator[LocalShard]:
        if adapter is None or merged:
            self._check_names()
        return super().export(adapter, merged=merged)

    def _write_hf(self, out_dir: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """transformers gives tensors their names on disk. Rank 0 holds the whole model meanwhile."""
        self._model.lm.save_pretrained(out_dir, state_dict=dict(tensors))
        hf.copy_companions(self._model_dir, out_dir, self._dtype)

    def _check_names(self) -> None:
        """Raises RunError where transformers renamed or fused tensors while loading, as it does for some."""
        if self.config.seed is not None:
            return
        if unknown := sorted(self._tensors.keys() - hf.tensor_names(self._model_dir)):
            raise RunError(
                f"transformers holds {len(unknown)} tensors under names of its own, such as {unknown[0]}: "
                f"they cannot be exported"
            )


def _named_linears(prefix: str, layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(f"{prefix}.{n}", m) for n, m in layer.named_modules() if isinstance(m, nn.Linear)]


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
