"""Every verb of both engines on a device that is not there: no kernel runs, but tensors of two devices do not mix.

The device is "meta" under FakeTensorMode, as strict as a GPU: what computes with a host's tensor, or reads a device's
tensor as numpy, raises. FSDP knows no such device and is left out: what it does with devices is torch's own. Run as
`python -m tests.models.fake_device JOB`, a JSON file: copies of rl/, each with one change, and the engines to try there; for
each it prints what was raised, "" for nothing, and whether that is a complaint of a tensor's device.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from unittest import mock


def exercise(model_dir: str, kinds: list[str]) -> None:
    """Raises where anything is on the wrong device."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = torch.device("meta")

    def apply(module, fn, recurse=True, made=None):
        """nn.Module's own swaps tensors in place, which fake ones refuse. Tied parameters stay tied.

        What only moves stays the same object, as between a host and a GPU.
        """
        made = {} if made is None else made
        for child in module.children():
            apply(child, fn, made=made)
        for name, p in module._parameters.items():
            if p is not None and isinstance(p, FakeTensor) and moved(p, fn(p.detach())):
                if p.grad is not None:
                    moved(p.grad, fn(p.grad))
            elif p is not None:
                made.setdefault(id(p), (p, torch.nn.Parameter(fn(p.detach()), p.requires_grad)))
                module._parameters[name] = made[id(p)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    def moved(tensor, new) -> bool:
        """Whether `new` is the same elsewhere; the tensor is then there."""
        same = tensor.shape == new.shape and tensor.dtype == new.dtype
        if same:
            tensor.fake_device = new.fake_device
        return same

    def init_process_group(timeout_seconds: float) -> torch.device:
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        return device

    def on_host(value):
        """What a read of the host's would give; only of a tensor that is there, as with a GPU's."""

        def read(tensor, *args, **kwargs):
            if tensor.device.type != "cpu":
                raise TypeError(
                    f"can't convert {tensor.device} device type tensor to numpy; use .cpu() first"
                )
            return value(tensor)

        return read

    def waiting(value):
        """A read that a GPU's queue has to be empty for."""

        def read(tensor, *args, **kwargs):
            waits.num += tensor.device.type != "cpu"
            return value(tensor, *args, **kwargs)

        return read

    import numpy as np

    waits = Waits()
    reads = {
        "numpy": on_host(lambda t: np.zeros(tuple(t.shape), str(t.dtype).removeprefix("torch."))),
        "item": waiting(lambda t: 1.0),
        "tolist": waiting(lambda t: np.ones(tuple(t.shape)).tolist()),
        "__bool__": waiting(lambda t: True),
        "any": lambda t: False,
        "unique": lambda t, return_inverse=False: (t[:2], torch.zeros_like(t)) if return_inverse else t[:2],
    }
    engine_module = importlib.import_module("rl.models.engine")
    titan, hf_engine = (
        importlib.import_module("rl.models.titan"),
        importlib.import_module("rl.models.hf_engine"),
    )
    spec_of = titan.model_spec

    def fail(failure, group=None):
        if failure:
            raise failure

    def unsharded(*args, **kwargs):
        spec = spec_of(*args, **kwargs)
        spec.parallelize_fn = lambda model, **_: model
        return spec

    with ExitStack() as stack:
        for name, read in reads.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, read, create=True))
        stack.enter_context(mock.patch.object(torch.nn.Module, "_apply", apply))
        stack.enter_context(
            mock.patch("torch.nn.utils.clip_grad._device_has_foreach_support", lambda _: True)
        )
        adamw = torch.optim.AdamW
        stack.enter_context(
            mock.patch.object(torch.optim, "AdamW", lambda groups, fused: adamw(groups, foreach=False))
        )
        for owner in (torch, torch.Tensor):
            stack.enter_context(mock.patch.object(owner, "equal", lambda a, b: a.device == b.device))
        stack.enter_context(mock.patch.object(engine_module, "init_process_group", init_process_group))
        stack.enter_context(mock.patch.object(engine_module, "Checkpoints", mock.Mock()))
        stack.enter_context(mock.patch("rl.models.agreement.fail_together", fail))
        stack.enter_context(mock.patch.object(dist, "broadcast_object_list"))
        stack.enter_context(mock.patch.object(titan, "model_spec", unsharded))
        stack.enter_context(mock.patch.object(titan.ParallelDims, "build_mesh", lambda dims: None))
        stack.enter_context(mock.patch.object(hf_engine, "fully_shard", lambda *_, **__: None))
        stack.enter_context(
            mock.patch.object(hf_engine, "init_device_mesh", lambda *_, **__: {"shard": None})
        )
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        engines = {"titan": titan.TitanEngine, "hf": hf_engine.HFEngine}
        for kind in kinds:
            _verbs(engines[kind], model_dir, device, waits)


class Waits:
    """How often the host waited for the device: `num`, and copies to the host within `counted`."""

    num = 0

    def counted(self, call) -> int:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        waits, before = self, self.num

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if func is torch.ops.aten._to_copy.default and args[0].device.type == "meta":
                    waits.num += result.device.type == "cpu"
                return result

        with Copies():
            call()
        return self.num - before


def _verbs(kind, model_dir, device, waits) -> None:
    import numpy as np
    import torch

    from rl.batching import pack
    from rl.loss.cispo import CISPO
    from rl.loss.clip import Clip
    from rl.loss.correction import Correction
    from rl.loss.cross_entropy import CrossEntropy
    from rl.loss.distillation import Distillation
    from rl.loss.dpo import DPO
    from rl.loss.dro import DRO
    from rl.loss.gspo import GSPO
    from rl.loss.importance_sampling import ImportanceSampling
    from rl.loss.kl import KL
    from rl.loss.objective import Objective
    from rl.loss.value import ClippedValue
    from rl.models.engine_config import EngineConfig
    from rl.models.export import whole_tensors
    from rl.models.loss_metrics import token_inputs
    from rl.types import LoRA, OptimParams, Sample
    from rl.weight_sync.buffers import write_shards

    def sample(seed: int, length: int) -> Sample:
        draw = np.random.default_rng(seed)
        names = ("old_logprobs", "ref_logprobs", "values", "returns", "old_values")
        scored = np.arange(length) > 4
        return Sample(
            tokens=draw.integers(3, 100, length), loss_mask=scored, generator_logprobs=np.zeros(length, np.float32),
            advantages=np.ones(length, np.float32), weights=np.ones(length, np.float32),
            loss_inputs={name: np.zeros(length, np.float32) for name in names},
        )  # fmt: skip

    rows = [sample(0, 40), sample(1, 21), sample(0, 30), sample(2, 70)]  # two micro-batches
    batch = pack(rows, max_tokens=96)
    losses = [Clip(), GSPO(), CISPO(), CrossEntropy(), Distillation(), DRO(), ImportanceSampling(), DPO()]
    objective = Objective(
        Clip(), Correction("trainer", tis_clip=2.0, mask_high=5.0), KL(coef=0.1), entropy_coef=0.1
    )
    (micro, *_) = batch.ranks[0]
    for loss in [*losses, ClippedValue(0.2)]:
        logprobs, entropy = (
            torch.zeros(len(micro.targets), device=device, requires_grad=True) for _ in range(2)
        )
        loss(logprobs, token_inputs(micro, entropy, device)).loss.backward()
    for settings in ({}, {"head": "value"}, {"adapters": True}):
        engine = kind(model_dir, EngineConfig(seed=1, **settings))
        assert engine.device == device and all(t.device == device for t in engine._tensors.values())
        adapter = None
        if settings.get("adapters"):
            adapter = "a"
            engine.adapters.add("a", LoRA(rank=2), seed=0)
            engine.adapters.add("b", LoRA(rank=2), seed=0)
            engine.adapters.copy("a", "b")
        engine.logits(batch, adapter)
        engine.forward_backward(batch, ClippedValue(0.2) if settings.get("head") else objective, adapter)
        engine.optim_step(OptimParams(1e-3), adapter)
        write_shards(engine.export(adapter), "key", lambda n: torch.empty(n, dtype=torch.uint8))
        for _, tensor in whole_tensors(engine._tensors, torch.bfloat16, engine._split):
            assert tensor.device.type == "cpu"
        engine.reset_optimizer(adapter)
        # Looked at once a call, for all micro-batches; a wait in each layer or bucket would be one in each of them.
        loss = ClippedValue(0.2) if settings.get("head") else objective
        few = pack(rows[:1], max_tokens=96)
        assert (len(few.ranks[0]), len(batch.ranks[0])) == (1, 2)
        once = waits.counted(lambda: engine.forward_backward(few, loss, adapter))  # noqa: B023
        twice = waits.counted(lambda: engine.forward_backward(batch, loss, adapter))  # noqa: B023
        assert once == twice == 2, f"{once} and {twice} waits for the device: finite, and the totals"
        scored = waits.counted(lambda: engine.forward(batch, adapter))  # noqa: B023
        assert scored == 2, f"{scored} waits for two micro-batches"


def names_a_device(error: BaseException) -> bool:
    """Whether tensors were on the wrong device: torch or numpy says so, or an assertion of this file does.

    An engine may raise an error of its own from it.
    """
    if isinstance(error, AssertionError):
        return traceback.extract_tb(error.__traceback__)[-1].filename == __file__
    if isinstance(error, RuntimeError | TypeError) and "device" in str(error):
        return True
    return error.__cause__ is not None and names_a_device(error.__cause__)


def main(job: dict) -> None:
    for path, kinds in job["copies"].items():
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)  # what engines print is not an answer
            sys.path.insert(0, path)
            try:
                exercise(job["model"], kinds)
                message, of_device = "", False
            except BaseException as error:
                message = "".join(traceback.format_exception(error))[-1500:] or repr(error)
                of_device = names_a_device(error)
            os.write(write, json.dumps({"copy": path, "raised": message, "of_device": of_device}).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answers:
            print(answers.read(), flush=True)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.path.remove(os.getcwd()) if os.getcwd() in sys.path else None
    gc.disable()  # of processes that end when they are done
    import torch  # noqa: F401  once for all copies
    import transformers  # noqa: F401

    main(json.loads(Path(sys.argv[1]).read_text()))
