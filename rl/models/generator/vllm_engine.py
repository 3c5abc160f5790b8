"""VLLM: one rank's vLLM engine, which runs commands and decodes one step at a time.

Synchronous; knows no event loop.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VLLMSamplingParams
from vllm.config import WeightTransferConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rl.errors import ConfigError, RunError, one_line
from rl.interfaces import Transport
from rl.models.generator import cpu_lora, sleep
from rl.models.generator.adapter_slots import AdapterSlots
from rl.models.generator.commands import Abort, Admit, Command, Load, Suspend, Tick
from rl.models.generator.vllm_arguments import engine_args, name_shared_memory, take_own_device
from rl.models.generator.vllm_config import VLLMConfig
from rl.models.generator.weights import BACKEND, fetch_on_all_ranks, register_backend
from rl.models.hf import max_positions, read_config
from rl.models.lora import write_adapter
from rl.types import Completion, Likeliest, LoRA, PolicyVersion, SamplingParams, StopReason, VersionRange
from rl.weight_sync.manifest import Manifest, assemble


@dataclass
class _Running:
    """A request that vLLM works on."""

    command: Admit
    vllm_id: str
    changes: list[tuple[int, PolicyVersion]]  # (tokens there were, the version that samples from there on)


class VLLM:
    """One engine to a process, which should run nothing else: vLLM changes its process.

    Ranks of a tensor-parallel engine each have one, and are given the same commands in the same order.
    """

    def __init__(self, config: VLLMConfig, transport: Transport):
        on_cpu = not torch.accelerator.is_available()
        if on_cpu:
            # Without it, bf16 attention on a CPU with AMX dies of SIGILL in a small model.
            torch.cpu._init_amx()
            if config.tensor_parallel > 1:
                name_shared_memory(config.shared_directory)
            if config.max_lora_rank:
                cpu_lora.install()
        take_own_device()
        register_backend(transport)
        try:
            self._engine = LLMEngine.from_engine_args(_engine_args(config, on_cpu))
            self._sample_a_token()
        except Exception as error:  # many kinds: of a config, an architecture, memory
            raise ConfigError(
                f"vLLM cannot start with the model of {config.model_dir} ({one_line(error):.400})"
            ) from error
        self._engine.collective_rpc("init_weight_transfer_engine", args=({},))
        self._transport = transport
        self._max_model_len = config.max_model_len
        # Of the two limits, the one that holds.
        its_own = max_positions(read_config(config.model_dir))
        raise_it = "raise max_seq_len, or make the prompt shorter"
        self._remedy = raise_it if config.max_model_len < its_own else "make the prompt shorter"
        held = config.max_adapters if config.max_lora_rank else 0
        self._adapters = AdapterSlots(self._engine.add_lora, self._engine.remove_lora, held)
        self._running: dict[str, _Running] = {}  # by the number of its command
        self._is_suspended = False
        self._waiting: list[Admit] = []  # for a place for their adapter
        self._adapter_files = tempfile.TemporaryDirectory(prefix="rl-adapters-")
        # Of the model (None) and of each adapter.
        self._versions: dict[str | None, PolicyVersion] = {None: 0} if config.weights == "directory" else {}

    def _sample_a_token(self) -> None:
        """Some models load, and fail when they compute."""
        self._engine.add_request("first", {"prompt_token_ids": [0]}, _vllm_params(SamplingParams(1)))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def tick(self, commands: Sequence[Command]) -> Tick:
        """Run the commands in order, then decode one step. One that raises RunError costs no other."""
        answers: dict[int, Completion | Exception | None] = {}
        waited, self._waiting = self._waiting, []
        for command in [*waited, *commands]:
            try:
                answers |= self._run(command)
            except RunError as error:
                answers[command.id] = error
        if self._running:
            finished = [output for output in self._engine.step() if output.finished]
            answers |= dict(map(self._finish, finished))
        return Tick(answers, len(self._running) + len(self._waiting))

    def _run(self, command: Command) -> dict[int, Exception | None]:
        match command:
            case Admit():
                self._admit(command)
                return {}
            case Abort():
                self._waiting = [admit for admit in self._waiting if admit.id not in command.requests]
                self._drop([str(number) for number in command.requests])
                return {command.id: None}
            case Suspend():
                self._suspend()
                return {command.id: None}
            case Load(manifest=manifest):
                failed = self._load(manifest)
                return {**failed, command.id: None}

    def _admit(self, command: Admit) -> None:
        params = command.params
        adapter = params.adapter
        directory = adapter if adapter is not None and os.path.isabs(adapter) else None
        for needed in dict.fromkeys((None, None if directory else adapter)):
            if needed not in self._versions:
                missing = "weights" if needed is None else f"adapter {needed!r}"
                raise RunError(
                    f"the generator has no {missing} yet; publish a policy version before the first sample"
                )
        if len(command.prompt) >= self._max_model_len:
            raise RunError(
                f"a prompt of {len(command.prompt)} tokens leaves no room in "
                f"max_model_len={self._max_model_len}; {self._remedy}"
            )
        # In order: else those whose adapter is held would keep every place.
        if directory and (self._waiting or not self._adapters.read(directory, self._sampled_with())):
            self._waiting.append(command)
            return
        try:
            vllm_id = self._engine.add_request(
                str(command.id),
                command.vllm_prompt(),
                _vllm_params(params),
                lora_request=self._adapters[adapter] if adapter else None,
            )
        except Exception as error:  # vLLM's many ways to refuse a request
            raise RunError(f"vLLM refused a request: {error}") from error
        version = self._versions[None if directory else adapter]
        self._running[str(command.id)] = _Running(command, vllm_id, [(0, version)])

    def _sampled_with(self) -> set[str]:
        return {r.command.params.adapter for r in self._running.values() if r.command.params.adapter}

    def _finish(self, output: RequestOutput) -> tuple[int, Completion | RunError]:
        request = self._running.pop(output.request_id)
        (sample,) = output.outputs
        if sample.finish_reason == "error":
            return request.command.id, RunError(
                "vLLM could not go on with a request; where it asks for JSON, simplify its schema"
            )
        tokens = list(sample.token_ids)
        logprobs = [position[token].logprob for position, token in zip(sample.logprobs, tokens, strict=True)]
        stop = StopReason.STOP if sample.finish_reason == "stop" else StopReason.LENGTH
        versions, per_token = _versions_of(request.changes, len(tokens))
        params, prompt = request.command.params, request.command.prompt
        arrays = np.array(tokens, np.int32), np.array(logprobs, np.float32)
        completion = Completion(*arrays, versions, stop, per_token, output.num_cached_tokens or 0)
        if params.num_likeliest:
            likeliest = tuple(_likeliest(position, params.num_likeliest) for position in sample.logprobs)
            completion = replace(completion, likeliest=likeliest)
        if params.prompt_likeliest is not None:
            completion = replace(completion, **_of_prompt(prompt, output, params.prompt_likeliest))
        return request.command.id, completion

    def _drop(self, numbers: Sequence[str]) -> None:
        dropped = [n for n in numbers if self._running.pop(n, None)]
        self._engine.abort_request(dropped)

    def _suspend(self) -> None:
        """What still runs is nobody's: see GeneratorReplica."""
        self._drop(list(self._running))
        self._waiting.clear()
        self._adapters.clear()
        self._engine.reset_prefix_cache()
        self._versions.clear()
        sleep.suspend(self._engine)  # once more where a load failed that had woken the weights
        self._is_suspended = True

    def _load(self, manifest: Manifest) -> dict[int, Exception]:
        """Between two steps. A new model drops adapters; returns requests with them. Raises RunError."""
        failed: dict[int, Exception] = {}
        if manifest.adapter is None:
            if self._is_suspended:
                sleep.take_weights(self._engine)
            self._engine.collective_rpc("start_weight_update")
            self._engine.collective_rpc("update_weights", args=({"manifest": manifest},))
            self._engine.collective_rpc("finish_weight_update")
            if self._is_suspended:
                sleep.take_cache(self._engine)
            self._is_suspended = False
            failed = self._drop_requests_with_adapters()
            self._adapters.clear()
            self._versions = {None: manifest.version}
        else:
            self._load_adapter(manifest, *manifest.adapter)
            self._versions[manifest.adapter[0]] = manifest.version
        self._engine.reset_prefix_cache(reset_running_requests=True)
        states = self._engine.output_processor.request_states
        for request in self._running.values():
            if request.command.params.adapter == (manifest.adapter[0] if manifest.adapter else None):
                num_tokens = states[request.vllm_id].detokenizer.num_output_tokens()
                request.changes.append((num_tokens, manifest.version))
        return failed

    def _drop_requests_with_adapters(self) -> dict[int, Exception]:
        """Their adapters belong to the model that has gone."""
        with_adapters = {n: r.command for n, r in self._running.items() if r.command.params.adapter}
        self._drop(list(with_adapters))
        return {
            command.id: RunError(
                f"adapter {command.params.adapter!r} was dropped while it was sampled with: another model "
                f"was loaded"
            )
            for command in with_adapters.values()
        }

    def _load_adapter(self, manifest: Manifest, name: str, lora: LoRA) -> None:
        """Through a directory in PEFT's format, which is what vLLM reads adapters from."""

        def write(number: int) -> Path:
            path = Path(self._adapter_files.name) / str(number)
            tensors = assemble(fetch_on_all_ranks(self._transport, manifest))
            write_adapter(path, lora, "", {n: t.float() for n, t in tensors})
            return path

        self._adapters.publish(name, write)


def _versions_of(
    changes: Sequence[tuple[int, PolicyVersion]], num_tokens: int
) -> tuple[VersionRange, np.ndarray]:
    """The range, and [T] int32, the version of each token, where it is more than one."""
    starts, versions = zip(*changes, strict=True)
    change_of = np.searchsorted(starts, np.arange(num_tokens), "right") - 1
    per_token = np.array(versions, np.int32)[change_of]
    oldest, newest = (int(per_token[0]), int(per_token[-1])) if num_tokens else (versions[-1],) * 2
    return VersionRange(oldest, newest), per_token[: num_tokens if oldest != newest else 0]


def _likeliest(position: Mapping[int, Any], count: int) -> Likeliest:
    """position: vLLM's logprobs of one token's place, the sampled one among them."""
    possible = ((token, entry.logprob) for token, entry in position.items() if entry.logprob > -math.inf)
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:count])


def _of_prompt(prompt: Sequence[int], output: RequestOutput, count: int) -> dict[str, Any]:
    """The prompt's part of a Completion."""
    places = list(zip(prompt, output.prompt_logprobs, strict=True))
    logprobs = tuple(None if place is None else place[token].logprob for token, place in places)
    likeliest = tuple(() if place is None else _likeliest(place, count) for _, place in places)
    return {"prompt_logprobs": logprobs, "prompt_likeliest": likeliest if count else ()}


def _engine_args(config: VLLMConfig, on_cpu: bool) -> EngineArgs:
    return EngineArgs(
        **engine_args(config, on_cpu),
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
    )


def _vllm_params(params: SamplingParams) -> VLLMSamplingParams:
    return VLLMSamplingParams(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        seed=params.seed,
        top_k=max(params.top_k, 0),  # 0: all
        top_p=params.top_p,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        stop=list(params.stop_texts),
        logprobs=params.num_likeliest,  # 0: of the sampled token alone
        prompt_logprobs=params.prompt_likeliest,
        detokenize=bool(params.stop_texts),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,  # stop_texts may have special tokens
        structured_outputs=StructuredOutputsParams(json=params.json_schema) if params.json_schema else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
