"""`rl serve` on real processes, through the official SDK: numbers against float64, sampling, a killed trainer."""

import json
import logging
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")
import transformers  # noqa: E402
from tinker import types  # noqa: E402
from tinker.types.tensor_data import TensorData  # noqa: E402

from rl.models.sources import TinyQwen3  # noqa: E402
from tests.integration.runs import start  # noqa: E402
from tests.numeric import assert_close_as, limit_by  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("tinker").setLevel(logging.CRITICAL)  # it looks for the server when that is gone
SECONDS = 180
TOKENS = list(range(2, 14))
AS_IT_IS = {"learning_rate": 1e6, "eps": 1e6, "beta1": 0.0, "beta2": 0.0}
"""AdamW's first step with these moves a weight by u = -g / (1 + |g| / eps), g its gradient."""


class Server:
    def __init__(self, root: Path):
        self.root = root
        self.model_dir = TinyQwen3(alphabet='abcdefghijklmnop"').materialize(root)
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(self.model_dir)
        config.initializer_range = 0.15
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(self.model_dir)
        self.directory = root / "server"
        self.start()

    def start(self):
        output = (self.root / "output.txt").open("w+")
        flags = ("--port", "0", "--context_length", "64", "--directory", self.directory, "--names", "tiny")
        self.process = start("serve", self.model_dir, *flags, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(r"at (http://\S+);", (self.root / "output.txt").read_text())):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.1)
        self.url = found[1]
        self.key = (self.directory / "api_keys").read_text().strip()

    def output(self) -> str:
        return (self.root / "output.txt").read_text()[-3000:]

    def client(self):
        return tinker.ServiceClient(base_url=self.url, api_key=self.key)

    def trainable(self, seed=0):
        return self.client().create_lora_training_client(base_model="tiny", rank=4, seed=seed).result()

    def saved(self, training, name: str) -> Path:
        """The directory of a checkpoint."""
        path = training.save_state(name).result().path
        model, kind, name = path.removeprefix("tinker://").split("/")
        (directory,) = (self.directory / "checkpoints" / model.replace(":", "-") / kind).glob(f"{name}.*")
        return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    os.environ["TINKER_TELEMETRY"] = "0"
    server = Server(tmp_path_factory.mktemp("serve"))
    yield server
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0, server.output()
    _, alive = psutil.wait_procs(children, 10)
    assert not alive


def reference(server, adapter: Path, data, dtype):
    """Logprobs of the targets [N] or [N, K] of each datum, and the parameters that they depend on."""
    from peft import PeftModel

    model = transformers.AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=dtype)
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).to(dtype)
    logprobs = []
    for datum in data:
        logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0]
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        several = targets.reshape(len(targets), -1)
        logprobs.append(logits.log_softmax(-1).gather(1, several).reshape(targets.shape))
    parameters = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    return logprobs, parameters


def expected_loss(loss, config, logprobs, datum):
    """Tinker's formulas."""
    given = {name: data.to_torch().to(logprobs.dtype) for name, data in datum.loss_fn_inputs.items()}
    if loss == "cross_entropy":
        return -(given["weights"] * logprobs).sum()
    q, a = given["logprobs"], given["advantages"]
    ratio = (logprobs - q).exp()

    def clip(ratio, *defaults):
        names = ("clip_low_threshold", "clip_high_threshold")
        of_all = [config.get(name, default) for name, default in zip(names, defaults, strict=True)]
        bounds = [given.get(name, torch.full_like(ratio, x)) for name, x in zip(names, of_all, strict=True)]
        return ratio.clamp(*bounds)

    if loss == "importance_sampling":
        return -(ratio * a).sum()
    if loss == "ppo":
        return -torch.minimum(ratio * a, clip(ratio, 0.8, 1.2) * a).sum()
    if loss == "cispo":
        return -(clip(ratio, 0.0, 4.0).detach() * logprobs * a).sum()
    if loss == "dro":
        return -(logprobs * a - config["beta"] / 2 * (logprobs - q) ** 2).sum()
    assert loss == "gspo"
    mask = given["sequence_ratio_mask"]
    s = (((logprobs - q) * mask).sum() / mask.sum()).exp().detach()
    ratio = s * (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * a, clip(ratio, 1 - 3e-4, 1 + 4e-4) * a).sum()


def make_data(loss, columns=0, seed=0, thresholds=False):
    """Two sequences, of which one's targets are not its own next tokens. thresholds: of each token."""
    rng = np.random.default_rng(seed)
    data = []
    for number, length in enumerate((9, 6)):
        tokens = rng.integers(2, 18, length + 1)
        shape = (length, columns) if columns else (length,)
        targets = tokens[1:] if number == 0 and not columns else rng.integers(2, 18, shape)
        inputs = {"target_tokens": torch.tensor(targets)}
        if loss == "cross_entropy":
            inputs["weights"] = torch.tensor(rng.normal(size=shape), dtype=torch.float32)
        else:
            inputs["logprobs"] = torch.tensor(rng.normal(-2.8, 0.4, shape), dtype=torch.float32)
            inputs["advantages"] = torch.tensor(rng.normal(size=shape), dtype=torch.float32)
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = torch.tensor([0.0] * 2 + [1.0] * (length - 2))
        if thresholds:
            for name, least, most in (("clip_low_threshold", 0.2, 1.0), ("clip_high_threshold", 1.0, 1.5)):
                inputs[name] = torch.tensor(rng.uniform(least, most, shape), dtype=torch.float32)
        given = {name: TensorData.from_torch(tensor) for name, tensor in inputs.items()}
        prompt = types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(types.Datum(model_input=prompt, loss_fn_inputs=given))
    return data


WIDE = {"clip_low_threshold": 0.2, "clip_high_threshold": 1.5}
LOSSES = [
    ("cross_entropy", {}, 0, False),
    ("cross_entropy", {}, 3, False),
    ("importance_sampling", {}, 0, False),
    ("importance_sampling", {}, 2, False),
    ("ppo", {}, 0, False),
    ("ppo", WIDE, 0, False),
    ("cispo", {}, 0, False),
    ("cispo", WIDE, 0, False),
    ("dro", {"beta": 0.05}, 0, False),
    ("gspo", WIDE, 0, False),
    ("ppo", {}, 0, True),
    ("cispo", {}, 0, True),
    ("gspo", {}, 0, True),
]


def test_each_loss_and_its_gradient_equal_a_float64_reference(server):
    training = server.trainable(seed=1)
    training.forward_backward(make_data("cross_entropy", seed=5), "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.02)).result()  # else B is 0 and A has no gradient
    before = training.save_state("before").result().path
    directory = server.saved(training, "begin")
    for loss, config, columns, thresholds in LOSSES:
        data = make_data(loss, columns, thresholds=thresholds)
        (in_fp32, _, gradients), (exact, loss_sum, exact_gradients) = (
            computed(loss, config, data, *reference(server, directory, data, dtype))
            for dtype in (torch.float32, torch.float64)
        )
        learner = server.client().create_training_client_from_state(before).result()
        measured = learner.forward(data, loss, config).result().metrics
        result = learner.forward_backward(data, loss, config).result()
        learner.optim_step(types.AdamParams(**AS_IT_IS)).result()
        label = (loss, config, columns, thresholds)
        ours = [got["logprobs"].to_torch() for got in result.loss_fn_outputs]
        assert_close_as(in_fp32, ours, exact, (label, "logprobs"))
        # What the logprobs' errors, all of one sign, make of the sum.
        slope = sum(row.grad.abs().sum().item() for row in exact)
        allowed = slope * limit_by(in_fp32, exact)
        for metrics in (measured, result.metrics):
            assert metrics["loss:sum"] == pytest.approx(loss_sum, abs=allowed), label  # holds: reference
        assert measured.keys() == result.metrics.keys(), label
        old = load_file(directory / "adapter_model.safetensors")
        new = load_file(server.saved(learner, "after") / "adapter_model.safetensors")
        assert old.keys() == exact_gradients.keys()
        moved = {name: old[name].double() - new[name].double() for name in old}
        by_update = {name: u / (1 - u.abs() / AS_IT_IS["eps"]) for name, u in moved.items()}
        assert_close_as(gradients, by_update, exact_gradients, (label, "gradients"))


def computed(loss, config, data, logprobs, parameters):
    """Logprobs with their gradients, the loss, and the parameters' gradients."""
    for row in logprobs:
        row.retain_grad()
    total = sum(expected_loss(loss, config, lp, d) for lp, d in zip(logprobs, data, strict=True))
    total.backward()
    return logprobs, total.item(), {name: p.grad for name, p in parameters.items()}


def test_parts_in_any_order_are_the_whole_and_tenants_do_not_change_each_other(server):
    data = make_data("cross_entropy", seed=2) + make_data("cross_entropy", seed=3)
    adam = types.AdamParams(learning_rate=0.01)

    def learn(training, parts):
        for _ in range(3):
            for part in parts:
                training.forward_backward(part, "cross_entropy")
            training.optim_step(adam)

    whole, parts, beside = (server.trainable(seed=7) for _ in range(3))
    learn(whole, [data])
    alone = load_file(server.saved(whole, "alone") / "adapter_model.safetensors")
    learn(parts, [data[2:], data[:2]])
    learn(beside, [data])  # both wait at the same time, and take turns
    together = load_file(server.saved(beside, "beside") / "adapter_model.safetensors")
    in_parts = load_file(server.saved(parts, "parts") / "adapter_model.safetensors")
    for name, tensor in alone.items():
        assert torch.equal(together[name], tensor)
        # holds: exact, sums in another order: 3e-7 in every variant measured
        assert (in_parts[name] - tensor).abs().max() < 1e-4


def test_samples_are_the_models_own(server):
    training = server.trainable(seed=3)
    for _ in range(3):
        training.forward_backward(make_data("cross_entropy", seed=4), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    learned = training.save_weights_and_get_sampling_client().result()
    base = server.client().create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(TOKENS[:4])
    params = types.SamplingParams(max_tokens=12, seed=5, stop=[])
    futures = [client.sample(prompt, 4, params) for client in (learned, base, learned)]  # in one batch
    first, of_base, again = (future.result().sequences for future in futures)
    assert [s.tokens for s in first] == [s.tokens for s in again]
    assert len({tuple(s.tokens) for s in first}) == 4
    assert [s.tokens for s in first] != [s.tokens for s in of_base]
    for sequence in first:
        tokens = TOKENS[:4] + sequence.tokens
        target = {"target_tokens": tokens[1:]}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=target)
        exact = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
        # holds: meaning, another adapter or position moves logprobs by over 1e-2
        assert (exact[3:] - torch.tensor(sequence.logprobs)).abs().max() < 1e-4
    whole = TOKENS[:4] + first[0].tokens
    scored = learned.compute_logprobs(types.ModelInput.from_ints(whole)).result()
    # holds: meaning, another adapter or position moves logprobs by over 1e-2
    assert scored[0] is None and scored[4:] == pytest.approx(first[0].logprobs, abs=1e-4)
    top = learned.sample(
        prompt, 1, types.SamplingParams(max_tokens=2, temperature=0.0, stop=[]),
        include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
    ).result()  # fmt: skip
    assert [len(place) for place in top.topk_prompt_logprobs[1:]] == [3, 3, 3]
    alternatives = learned.sample(
        types.ModelInput.from_ints(whole), 1, params, prompt_alt_tokens_k=3,
        target_prompt_logprobs=types.TensorData.from_torch(torch.tensor(whole[1:])[:, None]),
    ).result()  # fmt: skip
    own = alternatives.target_prompt_logprobs.to_torch()[:, 0]
    # holds: meaning, another adapter or position moves logprobs by over 1e-2
    assert own.tolist() == pytest.approx(scored[1:], abs=1e-4)
    drawn = alternatives.prompt_alt_tokens
    again = learned.sample(types.ModelInput.from_ints(whole), 1, params, target_prompt_logprobs=drawn.tokens)
    logprobs = again.result().target_prompt_logprobs.to_torch()
    # holds: meaning, another adapter or position moves logprobs by over 1e-2
    assert (logprobs - drawn.logprobs.to_torch()).abs().max() < 1e-4
    assert len({tuple(row) for row in drawn.tokens.to_torch().T.tolist()}) == 3
    greedy = top.sequences[0]
    assert [place[0][0] for place in greedy.topk_logprobs] == greedy.tokens
    stopped = base.sample(
        prompt, 8, types.SamplingParams(max_tokens=40, seed=0, stop=["a"])
    ).result().sequences  # fmt: skip
    tokenizer = training.get_tokenizer()
    ends = {tokenizer.decode(s.tokens[-1:]) for s in stopped if s.stop_reason == "stop"}
    assert "a" in ends and ends <= {"a", tokenizer.eos_token}
    assert all("a" not in tokenizer.decode(s.tokens[:-1]) for s in stopped)


def test_logprobs_are_of_what_a_token_was_drawn_from(server):
    """As tinker-cookbook's validate_temperature_logprobs: differences grow by 1 / temperature."""
    base = server.client().create_sampling_client(base_model="tiny").result()
    prompt = types.ModelInput.from_ints(TOKENS[:4])

    def place(**params):
        params = types.SamplingParams(max_tokens=1, seed=7, **params)
        answer = base.sample(prompt, 1, params, topk_sample_logprobs=5).result().sequences[0]
        likeliest = dict(answer.topk_logprobs[0])
        # holds: exact, they are of one token
        assert answer.logprobs[0] == pytest.approx(likeliest.get(answer.tokens[0], answer.logprobs[0]))
        return {token: logprob for token, logprob in likeliest.items() if logprob != -99999.0}

    plain = place(temperature=1.0)
    for temperature in (0.5, 2.0):
        scaled = place(temperature=temperature)
        first, *others = sorted(plain.keys() & scaled.keys())
        assert len(others) >= 3
        for other in others:
            difference = (plain[other] - plain[first]) / temperature
            # holds: meaning, without the temperature they differ by over 1e-2
            assert scaled[other] - scaled[first] == pytest.approx(difference, abs=1e-4)
    # holds: meaning, of equal logprobs a temperature would show nothing
    assert max(abs(a - b) for a in plain.values() for b in plain.values()) > 0.05
    two = place(temperature=1.0, top_k=2)
    assert len(two) == 2
    # holds: exact, a sum of two probabilities
    assert sum(map(math.exp, two.values())) == pytest.approx(1.0, abs=1e-5)


def test_openais_client_samples_the_base_model_and_checkpoints(server):
    openai = pytest.importorskip("openai")
    training = server.trainable(seed=2)
    for _ in range(5):
        training.forward_backward(make_data("cross_entropy", seed=8), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    path = training.save_weights_for_sampler("eval").result().path
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key)
    assert {"tiny", path} <= {model.id for model in client.models.list()}
    asked = {"prompt": TOKENS[:4], "max_tokens": 6, "seed": 1, "n": 2, "logprobs": 1}
    more = {"extra_body": {"return_token_ids": True}}
    ours, of_base = (client.completions.create(model=m, **asked, **more) for m in (path, "tiny"))
    assert ours.choices[0].token_ids != of_base.choices[0].token_ids
    assert ours.usage.prompt_tokens == 4 and len(ours.choices) == 2
    sampler = server.client().create_sampling_client(model_path=path).result()
    params = types.SamplingParams(max_tokens=6, seed=1)
    same = sampler.sample(types.ModelInput.from_ints(TOKENS[:4]), 2, params).result().sequences
    assert [c.token_ids for c in ours.choices] == [s.tokens for s in same]
    # holds: meaning, another adapter or position moves logprobs by over 1e-2
    assert ours.choices[0].logprobs.token_logprobs == pytest.approx(list(same[0].logprobs), abs=1e-4)
    text = client.completions.create(model="tiny", prompt="abc", max_tokens=3)
    assert isinstance(text.choices[0].text, str)
    for call, match in [
        (lambda: client.completions.create(model="other", prompt="a"), "no base model 'other'"),
        (lambda: client.completions.create(model="tiny", prompt="a", best_of=2), "best_of is not offered"),
        (
            lambda: client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}]),
            "no chat template",
        ),
    ]:
        with pytest.raises(openai.BadRequestError, match=match):
            call()
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-no", max_retries=0).models.list()


def test_openais_client_streams_what_is_sampled_whole(server):
    """Greedy, in slices of 16 tokens, with stop strings that the slices may cut in two."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key)
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0).choices[0]
    for stop in (None, [whole.text[15:18] or "x"]):
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "temperature": 0, "stop": stop}
        text = client.completions.create(**asked).choices[0].text
        chunks = list(client.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        assert stop is None or stop[0] not in text


def test_an_answer_is_held_to_a_schema(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)
    schema = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["abba", "baab"]}}}
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "extra_body": {"response_format": schema}}
    whole = client.completions.create(**asked, n=4).choices
    assert {(c.text, c.finish_reason) for c in whole} <= {('"abba"', "stop"), ('"baab"', "stop")}
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed in ('"abba"', '"baab"')
    fits_no_grammar = {"type": "json_schema", "json_schema": {"name": "no", "schema": {"enum": []}}}
    with pytest.raises(openai.APIStatusError):
        client.completions.create(**asked | {"extra_body": {"response_format": fits_no_grammar}})
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=3).choices[0].text is not None


@pytest.mark.slow
def test_a_killed_trainer_comes_back_with_every_model(server):
    quiet, disturbed = server.trainable(seed=9), server.trainable(seed=9)
    data, adam = make_data("cross_entropy", seed=6), types.AdamParams(learning_rate=0.02)
    for step in range(14):
        for training in (quiet, disturbed):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(adam).result()
        if step == 12:
            (log,) = [line for line in _processes(server) if "trainer" in line[1]]
            os.kill(log[0], signal.SIGKILL)
    files = [server.saved(t, "end") / "adapter_model.safetensors" for t in (quiet, disturbed)]
    one, other = map(load_file, files)
    assert all(torch.equal(one[name], other[name]) for name in one)
    fresh = server.trainable(seed=9)
    for _ in range(14):
        fresh.forward_backward(data, "cross_entropy")
        fresh.optim_step(adam).result()
    undisturbed = load_file(server.saved(fresh, "end") / "adapter_model.safetensors")
    assert all(torch.equal(one[name], undisturbed[name]) for name in one)


def _processes(server) -> list[tuple[int, str]]:
    """(pid, the log that it writes to) of the server's processes."""
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        try:
            found.append((child.pid, os.readlink(f"/proc/{child.pid}/fd/1")))
        except OSError:
            continue
    return found


def test_settings_of_an_adapter_are_honoured(server):
    made = server.client().create_lora_training_client(
        base_model="tiny", rank=2, seed=4, train_mlp=False, train_unembed=False
    ).result()  # fmt: skip
    directory = server.saved(made, "attention")
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["r"] == 2 and set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    same = server.client().create_lora_training_client(base_model="tiny", rank=2, seed=4).result()
    ours, theirs = (
        load_file(d / "adapter_model.safetensors") for d in (directory, server.saved(same, "all"))
    )
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())
    assert len(theirs) > len(ours)


def test_its_ports_are_on_the_loopback_interface_and_its_files_are_its_users(server):
    """Of every process: the server's, the engine's, the generators'. Each has written something by now."""
    server.saved(server.trainable(), "mine")
    processes = [server.process.pid, *(pid for pid, _ in _processes(server))]
    addresses = {
        connection.laddr.ip
        for pid in processes
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
    paths = [server.directory, *server.directory.rglob("*")]
    assert len(paths) > 10 and not [path for path in paths if path.stat().st_mode & 0o077]


@pytest.mark.slow
def test_a_signal_while_it_starts_ends_every_process(server, tmp_path):
    process = start("serve", server.model_dir, "--port", "0", "--directory", tmp_path / "server")
    log, deadline = tmp_path / "server" / "logs" / "trainer.log", time.monotonic() + SECONDS
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    _, alive = psutil.wait_procs(children, 10)
    assert not alive
