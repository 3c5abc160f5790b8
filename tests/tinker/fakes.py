"""A backend that computes nothing, and a server on it in a thread."""

import asyncio
import contextlib
import json
import logging
import threading
import time
from dataclasses import replace

import numpy as np
import uvicorn

from rl.tinker.app import make_app
from rl.tinker.backend import Backend, Learned, ModelsLost, UserError
from rl.tinker.database import Database
from rl.tinker.keys import Keys
from rl.tinker.limits import Limits
from rl.tinker.routes import Served
from rl.tinker.service import Service
from rl.types import Completion, StopReason, VersionRange
from tests.tinker.databases import url_of

# The SDK goes on to look for servers that are no more.
logging.getLogger("tinker").setLevel(logging.CRITICAL)
KEYS = ("tml-first", "tml-second")
NAME = "tiny"
VOCABULARY = 128


class FakeBackend(Backend):
    """A model is one number: optim_step adds lr times what forward_backward summed of the weights (1 each without).

    Logprobs are minus that number; of a prompt's tokens, minus the token. `log` is what was called, in order.
    """

    context_length = 64
    vocab_size = VOCABULARY

    def __init__(self):
        self.models, self.log, self.seeds, self.busy = {}, [], [], False
        self.lose_at = None  # the number of calls at which all models are lost, once
        self.delay = 0.0

    async def _call(self, *what):
        assert not self.busy, "training calls come one after the other"
        self.busy = True
        try:
            await asyncio.sleep(self.delay)
            self.log.append(what)
            if len(self.log) == self.lose_at:
                self.models.clear()
                raise ModelsLost("the engine died")
        finally:
            self.busy = False

    async def create(self, model, lora, seed):
        await self._call("create", model)
        assert model not in self.models
        self.seeds.append(seed)
        self.models[model] = {"value": float(seed % 7), "gradient": 0.0, "steps": 0, "rank": lora.rank}

    async def remove(self, model):
        await self._call("remove", model)
        del self.models[model]

    async def forward_backward(self, model, data, loss, config, forward_only):
        await self._call("forward" if forward_only else "forward_backward", model)
        state = self.models[model]
        if any(13 in datum.tokens for datum in data):
            raise UserError("13 is not a token that anybody wants")
        total = sum(float(d.inputs.get("weights", np.ones(d.targets.shape)).sum()) for d in data)
        if not forward_only:
            state["gradient"] += total
        logprobs = [np.full(d.targets.shape, -state["value"], np.float32) for d in data]
        return Learned(logprobs, {"loss:sum": total * state["value"]})

    async def optim_step(self, model, params):
        await self._call("optim_step", model)
        state = self.models[model]
        state["value"] += params.lr * state["gradient"]
        state["gradient"], state["steps"] = 0.0, state["steps"] + 1
        return {"grad_norm": 1.0}

    async def save(self, model, directory, optimizer):
        await self._call("save", model)
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(json.dumps(self.models[model]))

    async def load(self, model, directory, optimizer):
        await self._call("load", model)
        state = json.loads((directory / "adapter_config.json").read_text())
        self.models[model] = state | {"gradient": 0.0} | ({} if optimizer else {"steps": 0})

    async def sample(self, adapter, prompt, n, params, max_deaths=3):
        await asyncio.sleep(self.delay)
        value = json.loads((adapter / "adapter_config.json").read_text())["value"] if adapter else 0.0
        length = min(3, params.max_new_tokens)
        one = Completion([], [-value] * length, VersionRange(0, 0), StopReason.LENGTH)
        if params.prompt_likeliest is not None:
            own = (None, *(-float(token) for token in prompt[1:]))
            one = replace(one, prompt_logprobs=own, prompt_likeliest=((),) * len(prompt))
        seeds = range(params.seed, params.seed + n)
        return [replace(one, tokens=[(seed + i) % VOCABULARY for i in range(length)]) for seed in seeds]


class ScriptedBackend(FakeBackend):
    """Writes one text after any prompt, and ends as vLLM does; a prompt that ends in its beginning goes on."""

    context_length = 4096

    def __init__(self, tokenizer):
        super().__init__()
        self.vocab_size = max(tokenizer.vocabulary.values()) + 1
        self.asked = []  # params of each request
        self.num_cancelled = 0
        self._tokenizer = tokenizer
        self.write("")

    def write(self, text):
        self._script = [*self._tokenizer.encode_plain(text), self._tokenizer.eos_id]

    async def sample(self, adapter, prompt, n, params, max_deaths=3):
        self.asked.append(params)
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        lengths = range(len(self._script) - 1, 0, -1)
        start = next((k for k in lengths if list(prompt[-k:]) == self._script[:k]), 0)
        tokens = self._script[start : start + params.max_new_tokens]
        stop = StopReason.LENGTH
        for end in range(1, len(tokens) + 1):
            text = self._tokenizer.decode_with_special(tokens[:end])
            if tokens[end - 1] in params.stop_token_ids or any(t in text for t in params.stop_texts):
                tokens, stop = tokens[:end], StopReason.STOP
                break
        likeliest = tuple(((token, -0.5),) for token in tokens) if params.num_likeliest else ()
        logprobs = [-float(start + i) for i in range(len(tokens))]
        return [Completion(tokens, logprobs, VersionRange(0, 0), stop, likeliest=likeliest)] * n


@contextlib.contextmanager
def serving(root, backend=None, limits=Limits(), keys=KEYS, port=0, database_url=None, tokenizer=None):
    """(URL, service) of a server in a thread. tokenizer: for OpenAI's routes."""
    backend = backend or FakeBackend()
    root.mkdir(exist_ok=True)
    database = Database(database_url or url_of(root))
    eos = (0,) if tokenizer is None else (tokenizer.eos_id,)
    service = Service(database, backend, root, (NAME,), eos, limits)
    if keys:
        (root / "api_keys").touch(0o600)
        (root / "api_keys").write_text("\n".join(keys))
    app = make_app(
        service,
        Keys(root / "api_keys") if keys else None,
        Served((NAME,), None, "qwen3", backend.context_length),
        4,
        tokenizer,
    )
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1))

    async def main():
        working = asyncio.create_task(service.run())
        try:
            await server.serve()
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", service
    finally:
        server.should_exit = True
        thread.join(10)
        database.close()
