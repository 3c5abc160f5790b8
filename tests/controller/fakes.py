"""Actors without processes: they compute with made-up logprobs, and write down everything that a run asks of them."""

import asyncio
import hashlib
import json
import pickle
import time
import zlib
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from rl.actors.actors import Actors
from rl.actors.engine import EngineHandle
from rl.actors.reference import ReferenceAdapter, ReferenceMesh
from rl.config import RunConfig
from rl.config.learning import learning_of
from rl.controller.stages import RunStages
from rl.controller.training_batch import TrainingBatch, build_training_batch
from rl.controller.updaters import scorers
from rl.loss.base import TokenInputs
from rl.models.checkpoint_dir import prune
from rl.models.tokenizer import HFTokenizer
from rl.observability.batches import write_batch
from rl.observability.timeline import Timeline
from rl.types import POLICY, Completion, Score, StopReason, VersionRange
from rl.waiting import Deadlines
from rl.weight_sync.manifest import MODEL, Manifest
from rl.weight_sync.store import WeightStore
from tests.plans import trainer_config


def no_picture(recorder, title):
    """In the place of `Recorder.draw_curve`, which takes a quarter of a second."""
    return recorder.run_dir / "curve.png"


class FakeEngine(EngineHandle):
    """Its logprobs follow from the tokens and from its name; after each update they are others."""

    def __init__(self, name, calls, config, fail_on=None):
        super().__init__(name, None, config, Deadlines(), Timeline())
        self.calls, self.updates = calls, 0
        # (metric, token, updates): after so many, a batch with this token (None: any) has a loss or gradient that is not finite
        self.fail_on = fail_on
        self._bad = False

    def _scores(self, micro, who=""):
        seeds = [
            zlib.crc32(f"{self.name} {who} {self.updates} {i} {t}".encode())
            for i, t in enumerate(micro.targets)
        ]
        return np.array([np.random.default_rng(seed).normal(-1.5, 0.4) for seed in seeds], np.float32)

    is_suspended = False

    def note(self, *what):
        away = ("suspend", "resume", "finish_checkpoint", "ready")
        assert not self.is_suspended or what[0] in away, f"{self.name} is suspended, and asked for {what}"
        self.calls.append((self.name, *what))

    async def ready(self):
        return []

    async def forward(self, batch, adapter=None):
        self.note("forward", adapter, batch.num_target_tokens)
        found = {}
        for micro in (m for rank in batch.ranks for m in rank):
            scores = self._scores(micro, adapter or "")
            found |= {int(i): scores[micro.sample_ids == i] for i in np.unique(micro.sample_ids)}
        return found

    async def forward_backward(self, batch, loss, adapter=None):
        from rl.errors import NotFinite

        totals = {
            "tokens:sum": 0.0,
            "loss:sum": 0.0,
            "entropy:sum": 0.0,
            "logprob_diff:sum": 0.0,
            "logprob_diff:max": 0.0,
            "ratio_outside:sum": 0.0,
        }
        for micro in (m for rank in batch.ranks for m in rank):
            bad = (
                self.fail_on is not None
                and self.updates >= self.fail_on[2]
                and self.fail_on[1] in [None, *micro.targets]
            )
            if bad and self.fail_on[0] == "loss":
                raise NotFinite("the loss is nan", "loss")
            self._bad |= bad
            logprobs = torch.from_numpy(self._scores(micro)).requires_grad_()
            arrays = (micro.generator_logprobs, micro.advantages, micro.weights, micro.sample_ids)
            inputs = TokenInputs(
                *map(torch.from_numpy, arrays),
                {n: torch.from_numpy(c) for n, c in micro.loss_inputs.items()},
                entropy=-logprobs,
            )
            output = loss(logprobs, inputs)
            (gradient,) = torch.autograd.grad(output.loss + logprobs.sum() * 0, logprobs)
            totals["loss:sum"] += output.loss.item()
            totals["tokens:sum"] += len(micro.targets)
            totals["entropy:sum"] += -logprobs.sum().item()
            for name, value in output.metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value)
            self.note("learn", micro.targets.tolist(), output.loss.item(), gradient.tolist())
        return totals

    async def optim_step(self, params, adapter=None):
        from rl.errors import NotFinite

        if self._bad and self.fail_on[0] == "weights":  # no probe with a rate of 0 fails
            self._bad = False
            raise NotFinite("the weights are not finite", "weights")
        if self._bad:
            self._bad = False
            raise NotFinite("the gradient norm is inf; the step was not applied", "grad_norm")
        self.note("step", params)
        self.updates += params.lr > 0
        return {"grad_norm": 1.0}

    async def reset_optimizer(self, adapter=None):
        self.note("reset_optimizer")

    async def load_weights(self, model_dir):
        self.note("load_weights", Path(model_dir).name)

    async def save_hf(self, out_dir, adapter=None):
        self.note("save_hf", Path(out_dir).name)
        Path(out_dir).mkdir(parents=True, exist_ok=True)

    async def copy_adapter(self, source, target):
        self.note("copy_adapter", source, target)

    async def publish_weights(self, version, adapter=None):
        self.note("publish_weights", version)
        return Manifest(version, (), adapter)

    async def save_checkpoint(self, path, state, keep_last, wait=False):
        self.note("save_checkpoint", Path(path).name, keep_last)
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
        (Path(path) / "record.json").write_text(
            json.dumps({"state": state, "adapters": {}, "updates": self.updates})
        )
        prune(Path(path), keep_last)

    async def suspend(self, directory):
        self.note("suspend")
        self.is_suspended = True

    async def resume(self):
        self.note("resume")
        self.is_suspended = False

    async def finish_checkpoint(self):
        pass

    async def load_checkpoint(self, path):
        self.note("load_checkpoint", Path(path).name)
        record = json.loads((Path(path) / "record.json").read_text())
        self.updates = record["updates"]
        return record["state"]


class FakeGenerators:
    """A few tokens that follow from prompt and seed. They serve what the store holds, as soon as it does."""

    num_alive = num_serving = 1

    def __init__(self, calls, store, policy):
        self.calls, self.store, self.policy = calls, store, policy

    @property
    def changed(self):
        return self.store.changed

    @property
    def served(self):
        newest = self.store.newest(self.policy)
        return newest.version if newest else None

    async def until_dead(self):
        await asyncio.Event().wait()

    async def forget(self):
        await self.store.forget(self.policy)

    async def wait_served(self, version):
        await self.store.changed.wait_for(lambda: self.served is not None and self.served >= version)

    def at_least(self, version):
        assert self.served >= version
        return self

    @asynccontextmanager
    async def pinned(self):
        yield self.served, self

    def take_metrics(self):
        return {"generators/serving": 1, "generators/alive": 1}

    async def sample(self, prompt, n, params):
        self.calls.append(("generators", list(prompt), n, params))
        completions = []
        for i in range(n):
            rng = np.random.default_rng([*prompt, params.seed + i])
            length = int(rng.integers(2, params.max_new_tokens + 1))
            stop = StopReason.LENGTH if length == params.max_new_tokens else StopReason.STOP
            tokens, logprobs = rng.integers(3, 30, length).tolist(), rng.normal(-1.5, 0.4, length).tolist()
            completions.append(Completion(tokens, logprobs, VersionRange(self.served, self.served), stop))
        return completions


class FakeRewards:
    """1 or 0, by a hash of the response; one rollout in ten fails."""

    async def score(self, rollouts):
        scores = []
        for rollout in rollouts:
            digest = hashlib.blake2b(
                repr(rollout.segments[-1].tokens.tolist()).encode(), digest_size=1
            ).digest()[0]
            scores.append(Score(float(digest % 3 == 0), "it failed" if digest % 10 == 9 else None))
        return scores


async def nothing(manifest):
    """Releases a version that takes no memory."""


def fake_actors(config: RunConfig, run_dir: Path, fail_on=None) -> tuple[Actors, list]:
    """The actors, and the list to which everything asked of them is appended."""
    calls: list = []
    engine = trainer_config(config)
    trainer = FakeEngine("trainer", calls, engine, fail_on)
    reference = None
    if config.reference_is_adapter:
        reference = ReferenceAdapter(trainer)
    elif config.algorithm.needs_reference:
        reference = ReferenceMesh(FakeEngine("reference", calls, engine), trainer, run_dir)
    engines = {"critic": FakeEngine("critic", calls, engine)} if config.algorithm.needs_critic else {}
    policy = (POLICY, config.trainer.lora) if config.trainer.lora.rank else None
    store = WeightStore(nothing)
    generators = FakeGenerators(calls, store, POLICY if policy else MODEL)
    others = (store, config.deadlines, engines, reference, policy)
    return Actors(trainer, generators, FakeRewards(), *others), calls


def build(groups, config: RunConfig, tmp_path: Path) -> tuple[TrainingBatch, list]:
    """What a step would learn from these groups, and what was asked of the actors for it."""
    actors, calls = fake_actors(config, tmp_path)
    algorithm = config.algorithm
    return asyncio.run(build_training_batch(groups, algorithm, scorers(algorithm, actors))), calls


def run_fakes(config: RunConfig, tmp_path: Path, **options) -> tuple[list, "QuietRecorder"]:
    """A whole run: what was asked of the actors, and what was recorded."""
    actors, calls = fake_actors(config, tmp_path, **options)
    recorder = QuietRecorder(tmp_path)
    tokenizer = HFTokenizer(config.model.materialize(tmp_path))
    asyncio.run(RunStages(learning_of(config), config.resume, actors, tokenizer, recorder).run())
    return calls, recorder


class QuietRecorder(SimpleNamespace):
    """A recorder that keeps the metrics of each step."""

    def __init__(self, run_dir):
        super().__init__(
            run_dir=run_dir, steps={}, evaluations={}, waited_since={}, groups={}, failed={}, num_pauses=0
        )

    def warmup(self, *args):
        pass

    def step(self, step, metrics, groups, trained):
        self.steps[step], self.groups[step] = metrics, groups

    def now(self):
        return time.monotonic()

    def begin_steps(self):
        self.num_pauses += 1

    def say(self, text):
        print(text)

    def rollouts(self, step, split, groups):
        self.failed[step, split] = groups

    def evaluation(self, step, metrics, groups, waited_since):
        self.evaluations[step], self.waited_since[step] = metrics, waited_since

    async def keep_batch(self, step, batch, entropy_coef, keep_last):
        await asyncio.sleep(0)  # a turn, in which an interrupt may come
        write_batch(self.run_dir, step, batch, entropy_coef, keep_last)

    async def flush(self):
        await asyncio.sleep(0)

    async def write(self, job):
        await asyncio.sleep(0)
        return job()
