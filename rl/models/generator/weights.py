"""The receiving end of weight sync: a vLLM weight-transfer backend that assembles published shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rl.errors import RunError, one_line
from rl.interfaces import Transport
from rl.models.agreement import agreed
from rl.models.generator.sleep import drop_packed
from rl.weight_sync.manifest import Manifest, assemble

BACKEND = "rl_shards"
_REFUSALS = (KeyError, ValueError, AssertionError, AttributeError, TypeError)
"""What the loaders of vLLM's models raise where tensors are not theirs. It is the same on every rank."""


@dataclass
class ShardsInitInfo(WeightTransferInitInfo):
    """Nothing to set up: shards are found through the manifest."""


@dataclass
class ShardsUpdateInfo(WeightTransferUpdateInfo):
    manifest: Any  # of the version, which the worker fetches by itself


class ShardsEngine(WeightTransferEngine[ShardsInitInfo, ShardsUpdateInfo]):
    """Reshards from the trainer's layout to vLLM's.

    Full tensors are put together one at a time, and vLLM's own loader fuses and splits them. Layerwise
    reloading handles weights that vLLM repacked after loading, as it does on a CPU.
    """

    transport: ClassVar[Transport]

    init_info_cls = ShardsInitInfo
    update_info_cls = ShardsUpdateInfo

    def init_transfer_engine(self, init_info: ShardsInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """Nothing yet: where a version cannot be fetched, the one before stays."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would call torch.accelerator.synchronize(), which raises on a CPU.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShardsUpdateInfo) -> None:
        fetched = fetch_on_all_ranks(self.transport, update_info.manifest)
        initialize_layerwise_reload(self.model)
        drop_packed(self.model)  # else the old and the new ones are there at once
        name = type(self.model).__name__
        try:
            self.model.load_weights(self._tensors(fetched))
        except _REFUSALS as error:
            raise RunError(
                f"vLLM's {name} cannot load the weights that were published ({one_line(error):.300}); "
                f"use another model"
            ) from error
        if missing := self._without_weights():
            raise RunError(
                f"vLLM's {name} took no weights for {len(missing)} of its modules, such as {missing[0]}, and "
                f"would sample from random ones; use another model"
            )

    def _without_weights(self) -> list[str]:
        """Modules with parameters of their own of which none was loaded since the reload began.

        Attention is left out, whose scales of the cache no weights come with; and what shares its memory with
        a module that was loaded, as a head that is tied to the embedding.
        """
        loaded = {p.data_ptr() for p in self.model.parameters() if not p.is_meta}
        missing = []
        for name, module in self.model.named_modules():
            info = get_layerwise_info(module)
            parameters = dict(module.named_parameters(recurse=False))
            if (
                not (parameters and info.can_load())
                or info.load_numel
                or isinstance(module, AttentionLayerBase)
            ):
                continue
            kernel_parameters, _ = info.kernel_tensors
            if not all(p.data_ptr() in loaded for p in kernel_parameters.values()):
                missing.append(name)
        return missing

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(experts := _cpu_experts(module), CPUUnquantizedExperts):
                # vLLM 0.32 packs experts for the CPU at the first loading alone: later ones would be read as
                # packed.
                experts.process_weights_after_loading(module)

    def shutdown(self) -> None:
        pass

    def _tensors(self, fetched: Any) -> Any:
        for name, tensor in assemble(fetched):
            yield name, tensor
            tied = name == "model.embed_tokens.weight" and "lm_head.weight" not in fetched
            if tied and hasattr(self.model, "lm_head"):
                # Without it vLLM keeps the head it packed from the old embedding.
                yield "lm_head.weight", tensor


def fetch_on_all_ranks(transport: Transport, manifest: Manifest) -> Mapping[str, Any]:
    """What `transport.fetch` returns. Where one rank of the generator cannot fetch, all raise."""
    with agreed(group=get_tp_group().cpu_group):
        return transport.fetch(manifest)


def _cpu_experts(module: torch.nn.Module) -> Any:
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    return getattr(kernel, "fused_experts", None)


def register_backend(transport: Transport) -> None:
    """Make the backend, and where its worker fetches from, known to vLLM in this process.

    May be called again.
    """
    ShardsEngine.transport = transport
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ShardsEngine)
