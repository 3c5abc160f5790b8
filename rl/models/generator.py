"""GeneratorEngine: vLLM in this process, with a step loop of its own and weights that are handed to it.

It knows nothing of Monarch. One engine to a process, which should run nothing else: vLLM changes its process.
"""

import asyncio
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VLLMSamplingParams
from vllm.config import WeightTransferConfig
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from rl.errors import RunError
from rl.models.lora import write_adapter
from rl.models.vllm_weights import BACKEND, register_backend
from rl.types import Completion, LoRA, PolicyVersion, SamplingParams, StopReason, VersionRange
from rl.weight_sync.manifest import Manifest, Shard, assemble

Fetched = dict[str, list[tuple[Shard, torch.Tensor]]]


@dataclass(frozen=True)
class _Request:
    """One sample on its way."""

    prompt: list[int]
    params: VLLMSamplingParams
    adapter: str | None
    done: asyncio.Future[Completion]


class GeneratorEngine:
    """Samples completions; requests join and leave while others run (continuous batching).

    All its coroutines belong to one event loop.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        max_model_len: int = 2048,
        max_num_seqs: int = 256,
        kv_cache_gib: float = 0.25,
        compile: bool = False,
        max_lora_rank: int = 0,
        max_adapters: int = 1,
    ):
        """Reads only config.json of `model_dir`: weights come through `load_weights`, before the first `sample`.

        max_lora_rank: largest rank of an adapter, of which `max_adapters` are held at a time; 0 for no adapters.
        """
        on_cpu = not torch.accelerator.is_available()
        if on_cpu:
            torch.cpu._init_amx()  # without it, bf16 attention on a CPU with AMX dies of SIGILL in a small model
        register_backend()
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model_dir),
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=dtype,
                enforce_eager=not compile,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                # vLLM rewinds the seeded generator of a prompt that it cuts in two, which torch's CPU generator cannot do.
                enable_chunked_prefill=not on_cpu,
                max_num_batched_tokens=max(max_model_len, 4096),
                kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                disable_log_stats=True,
                **_lora_args(max_lora_rank, max_adapters),
            )
        )
        self._engine.collective_rpc("init_weight_transfer_engine", args=({},))
        self._max_model_len = max_model_len
        self._lock = asyncio.Lock()  # held for one engine step, or for one weight update
        self._waiting: deque[_Request] = deque()
        self._running: dict[str, tuple[_Request, PolicyVersion]] = {}  # with the version that admitted it
        self._num_requests = 0
        self._stepper: asyncio.Task[None] | None = None
        self._adapters: dict[str, LoRARequest] = {}
        self._max_adapters = max_adapters if max_lora_rank else 0
        self._adapter_files = tempfile.TemporaryDirectory(prefix="rl-adapters-")
        self._versions: dict[str | None, PolicyVersion] = {}  # of the model (None) and of each adapter

    async def sample(self, prompt: Sequence[int], n: int, params: SamplingParams) -> list[Completion]:
        """n completions of one prompt, in order; completion i is drawn with seed `params.seed + i`, whatever else runs.

        Raises RunError for a request that cannot be served; others go on.
        """
        for needed in dict.fromkeys((None, params.adapter)):
            if needed not in self._versions:
                what = "weights" if needed is None else f"adapter {needed!r}"
                raise RunError(f"the generator has no {what} yet; publish a policy version before the first sample")
        if len(prompt) >= self._max_model_len:
            raise RunError(
                f"a prompt of {len(prompt)} tokens leaves no room in max_model_len={self._max_model_len}; raise trainer.max_tokens"
            )
        loop = asyncio.get_running_loop()
        requests = [_Request(list(prompt), _vllm_params(params, params.seed + i), params.adapter, loop.create_future()) for i in range(n)]
        self._waiting.extend(requests)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_until_idle())
        return await asyncio.gather(*(request.done for request in requests))

    async def load_weights(self, manifest: Manifest, fetched: Fetched) -> None:
        """Switch to another version of the model, or of an adapter, between two steps.

        Running requests go on: their cache is computed again. A new version of the model drops the adapters.
        """
        async with self._lock:
            if manifest.adapter is None:
                self._fail_requests_with_adapters()
                await asyncio.to_thread(self._load_model, fetched)
                self._adapters.clear()
                self._versions = {None: manifest.version}
            else:
                name, lora = manifest.adapter
                if name not in self._adapters and len(self._adapters) >= self._max_adapters:
                    raise RunError(
                        f"adapter {name!r} is one more than the {self._max_adapters} that this generator holds; raise max_adapters"
                    )
                await asyncio.to_thread(self._load_adapter, name, lora, fetched)
                self._versions[name] = manifest.version

    def _fail_requests_with_adapters(self) -> None:
        """Their adapters belong to the model that is about to go."""
        running = [request_id for request_id, (request, _) in self._running.items() if request.adapter]
        dropped = [self._running.pop(request_id)[0] for request_id in running] + [r for r in self._waiting if r.adapter]
        self._waiting = deque(r for r in self._waiting if not r.adapter)
        for request in dropped:
            _resolve(request, RunError(f"adapter {request.adapter!r} was dropped while it was sampled with: another model was loaded"))
        self._engine.abort_request(running)

    def _load_model(self, fetched: Fetched) -> None:
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", args=({"fetched": fetched},))
        self._engine.collective_rpc("finish_weight_update")
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _load_adapter(self, name: str, lora: LoRA, fetched: Fetched) -> None:
        """By way of a directory in PEFT's format, which is what vLLM reads adapters from."""
        number = self._adapters[name].lora_int_id if name in self._adapters else 1 + len(self._adapters)
        path = Path(self._adapter_files.name) / str(number)
        write_adapter(path, lora, "", {n: t.float() for n, t in assemble(fetched)})
        self._engine.add_lora(LoRARequest(name, number, str(path), load_inplace=True))
        self._adapters[name] = LoRARequest(name, number, str(path))
        self._engine.reset_prefix_cache(reset_running_requests=True)

    @property
    def version(self) -> PolicyVersion | None:
        """The newest version of what it samples with."""
        return max(self._versions.values(), default=None)

    async def _step_until_idle(self) -> None:
        try:
            while self._waiting or self._running:
                async with self._lock:
                    rejected, outputs = await asyncio.to_thread(self._step)
                for request, error in rejected:
                    _resolve(request, RunError(f"vLLM refused a request: {error}"))
                for output in outputs:
                    self._finish(output)
        except Exception as error:  # the engine is broken: whoever waits must hear of it
            running = dict(self._running)
            for request in [*self._waiting, *(request for request, _ in running.values())]:
                _resolve(request, RunError(f"the generator's engine failed: {error!r}"))
            self._waiting.clear()
            self._running.clear()
            self._engine.abort_request(list(running))
            raise

    def _step(self) -> tuple[list[tuple[_Request, Exception]], list[RequestOutput]]:
        """Admit what waits, run one step. In a thread, so that the event loop stays free to take requests."""
        rejected = []
        while self._waiting:
            request = self._waiting.popleft()
            request_id = str(self._num_requests)
            self._num_requests += 1
            try:
                admitted = request, self._versions[request.adapter]
                self._engine.add_request(
                    request_id, {"prompt_token_ids": request.prompt}, request.params, lora_request=self._adapters.get(request.adapter)
                )
            except Exception as error:  # costs this request alone
                rejected.append((request, error))
            else:
                self._running[request_id] = admitted
        return rejected, self._engine.step()

    def _finish(self, output: RequestOutput) -> None:
        request, admitted = self._running.pop(output.request_id)
        (sample,) = output.outputs
        tokens = list(sample.token_ids)
        logprobs = [position[token].logprob for position, token in zip(sample.logprobs, tokens, strict=True)]
        stop = StopReason.STOP if sample.finish_reason == "stop" else StopReason.LENGTH
        _resolve(request, Completion(tokens, logprobs, VersionRange(admitted, self._versions[request.adapter]), stop))


def _resolve(request: _Request, result: Completion | Exception) -> None:
    if request.done.done():  # whoever asked has gone
        return
    if isinstance(result, Exception):
        request.done.set_exception(result)
    else:
        request.done.set_result(result)


def _lora_args(max_rank: int, max_adapters: int) -> dict[str, Any]:
    if not max_rank:
        return {}
    rank = min((r for r in get_args(MaxLoRARanks) if r >= max_rank), default=max_rank)  # vLLM takes some ranks alone
    # On a CPU, vLLM 0.32 computes requests without an adapter with whatever is in its last slot: that one stays empty.
    slots = max_adapters + (not torch.accelerator.is_available())
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": slots, "max_cpu_loras": slots}


def _vllm_params(params: SamplingParams, seed: int) -> VLLMSamplingParams:
    return VLLMSamplingParams(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        seed=seed,
        stop_token_ids=list(params.stop_token_ids),
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
