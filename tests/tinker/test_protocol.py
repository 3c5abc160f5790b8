"""The official SDK, unmodified, against a server whose backend computes nothing: order, retries, limits, tenants."""

# holds: exact, the fake backend counts in float64

import asyncio
import json
import os

import httpx
import numpy as np
import pytest
import torch

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")
import zstandard  # noqa: E402
from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402

from rl.tinker.limits import Limits  # noqa: E402
from rl.tinker.prompt_scores import PromptScores  # noqa: E402
from rl.types import Completion, SamplingParams, StopReason, VersionRange  # noqa: E402
from tests.tinker.fakes import KEYS, NAME, FakeBackend, serving  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ["TINKER_TELEMETRY"] = "0"
ADAM = types.AdamParams(learning_rate=0.1)


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "server") as (url, service):
        yield url, service


def client(url, key=KEYS[0]):
    return tinker.ServiceClient(base_url=url, api_key=key)


def datum(tokens=(1, 2, 3), **inputs):
    target = [*tokens[1:], 4]
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": target, **inputs},
    )


def value_of(training):
    """What the fake's model has learned."""
    return -training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data[0]


def post(url, path, body, key=KEYS[0], **settings):
    return httpx.post(f"{url}/api/v1/{path}", json=body, headers={"X-API-Key": key}, **settings)


def request_body(model_id, seq_id, tokens=(1, 2, 3), targets=(2, 3, 4), loss="cross_entropy"):
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    one.loss_fn_inputs["target_tokens"].dense = np.asarray(targets, np.int64).tobytes()
    one.loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_INT64
    one.loss_fn_inputs["target_tokens"].shape.append(len(targets))
    return message.SerializeToString()


def post_bytes(url, body, key=KEYS[0], **headers):
    headers = {"X-API-Key": key, "Content-Type": "application/x-protobuf", **headers}
    return httpx.post(f"{url}/api/v1/forward_backward", content=body, headers=headers)


def test_a_script_on_the_sdk_alone(server):
    url, _ = server
    rest = tinker.RestClient(base_url=url, api_key=KEYS[0])
    (model,) = rest.get_server_capabilities().result().supported_models
    assert model.model_name == NAME and model.max_context_length == 64
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=3).result()
    assert training.get_info().lora_rank == 8
    learned = training.forward_backward([datum(weights=[1.0, 1.0, 0.5])], "cross_entropy")
    step = training.optim_step(ADAM)
    assert learned.result().metrics == {"loss:sum": 7.5}
    assert learned.result().loss_fn_outputs[0]["logprobs"].data == [-3.0] * 3
    assert step.result().metrics == {"grad_norm:mean": 1.0}
    assert value_of(training) == pytest.approx(3.25)
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, seed=1)
    sampled = sampler.sample(types.ModelInput.from_ints([5, 6]), 2, params).result()
    assert [s.tokens for s in sampled.sequences] == [[1, 2, 3], [2, 3, 4]]
    assert sampled.sequences[0].logprobs == pytest.approx([-3.25] * 3)
    assert sampled.sequences[0].topk_logprobs is None and sampled.topk_prompt_logprobs is None
    path = training.save_state("one").result().path
    again = client(url).create_training_client_from_state_with_optimizer(path).result()
    assert value_of(again) == pytest.approx(3.25)
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert info.lora_rank == 8 and info.base_model == NAME and not info.train_unembed
    assert rest.list_user_checkpoints().result().checkpoints[0].tinker_path == path
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    listed = rest.list_checkpoints(training.model_id).result().checkpoints[0]
    assert listed.public and listed.expires_at is not None and listed.size_bytes > 0
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not rest.list_user_checkpoints().result().checkpoints


def test_a_sampler_stays_where_its_model_was(server):
    url, _ = server
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    params = types.SamplingParams(max_tokens=1, seed=0)
    samplers = []
    for _ in range(2):
        samplers.append(training.save_weights_and_get_sampling_client().result())
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(ADAM).result()
    prompt = types.ModelInput.from_ints([5])
    found = [s.sample(prompt, 1, params).result().sequences[0].logprobs[0] for s in samplers]
    assert found == pytest.approx([0.0, -0.3])


def sampled(sampler, prompt, **asked):
    prompt, params = types.ModelInput.from_ints(prompt), types.SamplingParams(max_tokens=1, seed=0)
    return sampler.sample(prompt, 1, params, **asked).result()


def test_another_optimizer_is_refused_before_anything_learns(server):
    url, _ = server
    training = client(url).create_lora_training_client(base_model=NAME).result()
    session, other = training.model_id.split(":")[0], {"optimizer_config": {"type": "dimuon", "version": 1}}
    asked = {"session_id": session, "model_seq_id": 7}
    answer = post(url, "create_model", asked | other | {"base_model": NAME, "lora_config": {"rank": 4}})
    assert "'dimuon' is not offered here; use adamw" in answer.text
    state = {"path": training.save_state("best").result().path, "optimizer": False}
    for place in (asked, {"model_id": training.model_id, "seq_id": 99}):
        answer = post(url, "load_weights", place | state | other)
        assert answer.status_code == 422 and "'dimuon' is not offered here; use adamw" in answer.text


def test_named_tokens_are_scored_along_a_prompt(server):
    """The fake's logprob of a prompt's token is minus the token."""
    sampler = client(server[0]).create_sampling_client(base_model=NAME).result()
    wanted = torch.tensor([[7, -1], [-1, -1], [3, 9]])
    for tensor in (
        types.TensorData.from_torch(wanted),
        types.TensorData.from_torch_sparse(wanted, pad_value=-1),
    ):
        scored = sampled(sampler, [5, 6, 7, 8], target_prompt_logprobs=tensor).target_prompt_logprobs
        assert scored.sparse_crow_indices == tensor.sparse_crow_indices
        expected = [[-7.0, 0.0], [0.0, 0.0], [-3.0, -9.0]]
        assert scored.to_torch().to_dense().tolist() == expected
    drawn = sampled(sampler, [5, 6, 7], prompt_alt_tokens_k=4).prompt_alt_tokens
    assert drawn.tokens.shape == drawn.logprobs.shape == [2, 4]
    last = sampled(sampler, [5, 6, 7], include_prompt_logprobs=True, prompt_logprobs_last_n=1)
    assert last.prompt_logprobs == [None, None, -7.0] and last.topk_prompt_logprobs is None


def test_what_is_scored_weighs_as_much_as_it_reads():
    """A cell of -1 is none of it."""
    wanted = torch.full((1499, 4), -1, dtype=torch.int64)
    wanted[1000, 2], wanted[20, 0] = 7, 8
    tensor = {"data": wanted.flatten().tolist(), "shape": [1499, 4], "dtype": "int64"}
    scores = PromptScores({"target_prompt_logprobs": tensor}, [1] * 1500, SamplingParams(1), 128)
    asked, most, running = [], 0, 0

    async def sample(prompt, n, params):
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        asked.append(len(prompt))
        return [
            Completion([1], [0.0], VersionRange(0, 0), StopReason.LENGTH, prompt_logprobs=(None, -1.0))
        ] * n

    asyncio.run(scores.compute(sample))
    assert sorted(asked) == [22, 1002] and sum(asked) == scores.num_tokens
    drawn = PromptScores({"prompt_alt_tokens_k": 2}, [1] * 101, SamplingParams(1, seed=0), 128)
    asyncio.run(drawn.compute(sample))
    assert len(asked) == 102 and drawn.num_tokens == 200 and most == 16


def test_what_cannot_be_scored_is_refused(server):
    sampler = client(server[0]).create_sampling_client(base_model=NAME).result()
    too_many = types.TensorData.from_torch(torch.zeros(2, 600, dtype=torch.int64))
    unknown = types.TensorData.from_torch(torch.tensor([[500], [1]]))
    ragged = types.TensorData(data=[1, 2], dtype="int64", shape=[1, 2])
    bad = [
        ({"target_prompt_logprobs": too_many}, "at most 1024"),
        ({"target_prompt_logprobs": unknown}, "neither -1 nor one of 128"),
        ({"target_prompt_logprobs": ragged}, r"has to be int64 of \[2, K\]"),
        ({"prompt_alt_tokens_k": 600}, "at most 1024"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "has to be 1 to 2"),
    ]
    for asked, match in bad:
        with pytest.raises(tinker.UnprocessableEntityError, match=match):
            sampled(sampler, [5, 6, 7], **asked)


def test_a_finished_session_leaves_no_sampler_behind(server, tmp_path):
    url, _ = server
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    for _ in range(3):
        training.save_weights_and_get_sampling_client().result()
    kept = training.save_weights_for_sampler("kept").result().path
    session = training.model_id.split(":")[0]
    left = tmp_path / "server" / "samplers"
    assert len(list((left / session).iterdir())) == 3
    assert post(url, f"sessions/{session}/finish", {"reason": {"type": "done"}}).status_code == 204
    assert not list(left.iterdir())
    assert client(url).create_sampling_client(model_path=kept).result()


def test_a_custom_loss_of_the_client_learns(server):
    url, _ = server
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=2).result()

    def squares(data, logprobs):
        loss = sum((values**2).sum() for values in logprobs)
        return loss, {"squares": float(loss.detach())}

    result = training.forward_backward_custom([datum()], squares).result()
    assert result.metrics["squares"] == pytest.approx(12.0)
    training.optim_step(ADAM).result()
    assert value_of(training) == pytest.approx(2 + 0.1 * 3 * 4)  # weights = -dC/dlogprob = 4 each


def test_chunks_that_arrive_out_of_order_are_one_batch(server, monkeypatch):
    """The SDK sends the first chunk last."""
    url, service = server
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    data = [datum(weights=[float(i), 0.0, 0.0]) for i in range(2500)]
    result = training.forward_backward(data, "cross_entropy")
    training.optim_step(ADAM).result()
    assert len(result.result().loss_fn_outputs) == 2500
    assert [what for what, _ in service.backend.log].count("forward_backward") == 3
    assert value_of(training) == pytest.approx(0.1 * sum(range(2500)))


def test_a_request_that_is_sent_again_is_the_same_one(server):
    url, _ = server
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    body = request_body(training.model_id, 100)
    first, again = post_bytes(url, body).json(), post_bytes(url, body).json()
    assert first == again
    optim = {"model_id": training.model_id, "seq_id": 101, "adam_params": {"learning_rate": 0.1}}
    ids = [post(url, "optim_step", optim).json()["request_id"] for _ in range(3)]
    assert len(set(ids)) == 1
    for id in (first["request_id"], ids[0]):
        assert post(url, "retrieve_future", {"request_id": id}).status_code == 200
    assert value_of(training) == pytest.approx(0.3)


def test_tenants_do_not_see_each_other(server):
    url, _ = server
    mine = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    path = mine.save_state("secret").result().path
    sampler = mine.save_weights_and_get_sampling_client().result()
    session = mine.model_id.split(":")[0]
    run = f"training_runs/{mine.model_id}"
    theirs = {"X-API-Key": KEYS[1]}
    for method, where in [
        ("GET", run),
        ("GET", f"{run}/checkpoints"),
        ("DELETE", f"{run}/checkpoints/weights/secret"),
        ("POST", f"{run}/checkpoints/weights/secret/publish"),
        ("GET", f"sessions/{session}"),
        ("GET", f"samplers/{sampler._sampling_session_id}"),
    ]:
        assert httpx.request(method, f"{url}/api/v1/{where}", headers=theirs).status_code == 404, where
    bodies = [
        ("retrieve_future", {"request_id": f"{mine.model_id}:1"}),
        ("get_info", {"model_id": mine.model_id}),
        ("weights_info", {"tinker_path": path}),
        ("copy_weights", {"session_id": session, "model_seq_id": 5, "source_path": path}),
        ("retrieve_futures", {"target": {"sampling_session_id": sampler._sampling_session_id}}),
        ("session_heartbeat", {"session_id": session}),
        ("optim_step", {"model_id": mine.model_id, "seq_id": 9, "adam_params": {}}),
        ("load_weights", {"model_id": mine.model_id, "seq_id": 9, "path": path, "optimizer": True}),
    ]
    for where, body in bodies:
        assert post(url, where, body, key=KEYS[1]).status_code == 404, where
    assert post_bytes(url, request_body(mine.model_id, 50), key=KEYS[1]).status_code == 404
    other = client(url, KEYS[1])
    with pytest.raises(Exception, match="no checkpoint"):
        other.create_training_client_from_state(path).result()
    tinker.RestClient(base_url=url, api_key=KEYS[0]).publish_checkpoint_from_tinker_path(path).result()
    assert value_of(other.create_training_client_from_state(path).result()) == 0


def test_one_models_flood_does_not_stop_another(tmp_path):
    backend = FakeBackend()
    backend.delay = 0.01
    with serving(tmp_path / "server", backend) as (url, _):
        flooding = client(url).create_lora_training_client(base_model=NAME, rank=8).result()
        other = client(url, KEYS[1]).create_lora_training_client(base_model=NAME, rank=8).result()
        flood = [flooding.forward([datum()], "cross_entropy") for _ in range(200)]
        for _ in range(3):
            value_of(other)
        done = [what for what, model in backend.log if what == "forward" and model == flooding.model_id]
        assert len(done) < 100
        assert len([f.result() for f in flood]) == 200


def test_what_cannot_be_computed_says_why_and_costs_no_other(server):
    url, _ = server
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    bad = [
        ([datum(tokens=(13, 2, 3))], "cross_entropy", {}, "13 is not a token"),
        ([datum(tokens=(500, 2))], "cross_entropy", {}, "outside the vocabulary of 128"),
        ([datum(tokens=tuple([1] * 64))], "cross_entropy", {}, "of which there have to be 1 to 63"),
        ([datum()], "ppo", {}, r"ppo needs \['logprobs', 'advantages'\]"),
        ([datum()], "nonsense", {}, "unknown loss_fn 'nonsense'"),
        ([datum()], "stable_reinforce", {}, "its formula is not public"),
        ([datum(weights=[1.0, 2.0])], "cross_entropy", {}, "weights has shape"),
        ([datum(weights=[1.0, float("nan"), 1.0])], "cross_entropy", {}, "weights is not finite"),
        ([datum(logprobs=[0.0] * 3, advantages=[1.0] * 3)], "ppo", {"clip": 2.0}, "no setting 'clip'"),
        (
            [datum(logprobs=[0.0] * 3, advantages=[1.0] * 3)],
            "ppo",
            {"clip_low_threshold": 1.5},
            "which does not hold 1",
        ),
    ]
    for data, loss, config, match in bad:
        with pytest.raises(tinker.RequestFailedError, match=match):
            training.forward_backward(data, loss, config).result()
    with pytest.raises(tinker.RequestFailedError, match="optim_step without a gradient"):
        training.optim_step(ADAM).result()
    with pytest.raises(Exception, match="a LoRA rank of 99"):
        client(url).create_lora_training_client(base_model=NAME, rank=99).result()
    with pytest.raises(Exception, match="no base model 'other'"):
        client(url).create_lora_training_client(base_model="other", rank=8).result()
    training.save_state("name").result()
    with pytest.raises(tinker.RequestFailedError, match="is there already"):
        training.save_state("name").result()
    assert training.save_state("name", overwrite=True).result().path.endswith("/weights/name")
    for name in ("../up", "a/b", "", ".hidden", "x" * 200):
        answer = post(
            url, "save_weights", {"model_id": training.model_id, "seq_id": 900, "path": name or "/"}
        )
        assert answer.status_code == 422 and "checkpoint's name" in answer.json()["error"]
    sampler = client(url).create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints
    for tokens, n, params, match in [
        ([5] * 64, 1, {}, "a prompt of 64 tokens"),
        ([-1], 1, {}, "outside the vocabulary"),
        ([5], 1000, {}, "num_samples=1000"),
        ([5], 1, {"temperature": -1.0}, "temperature=-1.0"),
        ([5], 1, {"stop": [""]}, "an empty stop string"),
    ]:
        with pytest.raises(Exception, match=match):
            sampler.sample(prompt(tokens), n, types.SamplingParams(**params)).result()


def test_whoever_has_no_key_gets_nothing(server):
    url, _ = server
    assert httpx.get(f"{url}/api/v1/healthz").status_code == 200
    for headers in ({}, {"X-API-Key": "tml-wrong"}, {"Authorization": "Bearer tml-wrong"}):
        for path in ("", "api/v1/get_server_capabilities", "api/v1/training_runs", "api/v1/nothing"):
            assert httpx.get(f"{url}/{path}", headers=headers).status_code == 401
    browser = httpx.get(url, auth=("anyone", KEYS[0]))
    assert browser.status_code == 200 and "rl serve: tiny" in browser.text and KEYS[0] not in browser.text


def test_malformed_bodies_are_refused(server):
    url, _ = server
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    assert len(bomb) < 1 << 16
    cases = [
        (b"\xff\xfe", {}, 422),
        (b"\x00" * 5_000_000, {}, 413),
        (bomb, {"Content-Encoding": "zstd"}, 413),
        (b"not zstd", {"Content-Encoding": "zstd"}, 422),
        (request_body("nobody:train:0", 1), {}, 404),
    ]
    for body, headers, status in cases:
        assert post_bytes(url, body, **headers).status_code == status
    for path in ("create_session", "asample", "forward_backward"):
        chunks = (b"[" + b"1," * 500_000 for _ in range(5))  # without a length
        answer = httpx.post(f"{url}/api/v1/{path}", content=chunks, headers={"X-API-Key": KEYS[0]})
        assert answer.status_code == 413 and "send less at once" in answer.json()["error"], path
    nowhere = post(url, "nothing", {})
    assert nowhere.status_code == 404 and nowhere.json()["category"] == "user"
    whole = zstandard.ZstdCompressor().compress(request_body(training.model_id, 70))
    id = post_bytes(url, whole, **{"Content-Encoding": "zstd"}).json()["request_id"]
    answer = post(url, "retrieve_future", {"request_id": id})
    assert answer.headers["content-type"] == "application/x-protobuf"
    ragged = request_body(training.model_id, 71, targets=(2, 3))
    id = post_bytes(url, ragged).json()["request_id"]
    failed = post(url, "retrieve_future", {"request_id": id}).json()
    assert failed["category"] == "user" and "target_tokens of shape [2]" in failed["error"]
    for path, body in [("create_session", []), ("asample", {"seq_id": "x"}), ("optim_step", {"model_id": 3})]:
        assert post(url, path, body).status_code == 422
    assert post(url, "create_custom_loss", {}).status_code == 422
    assert post_bytes(url, request_body(training.model_id, 0)).status_code == 422
    nameless = {"model_id": training.model_id, "adam_params": {"learning_rate": 0.1}}
    assert "seq_id" in post(url, "optim_step", nameless).json()["error"]


class Held(FakeBackend):
    is_held = False

    async def _call(self, *what):
        while self.is_held:
            await asyncio.sleep(0.01)
        await super()._call(*what)


def test_a_tenant_has_so_many_requests_waiting_and_no_more(tmp_path):
    backend = Held()
    with serving(tmp_path / "server", backend, Limits(max_waiting=5)) as (url, _):
        training = client(url).create_lora_training_client(base_model=NAME, rank=8).result()
        backend.is_held = True  # none of them ends before the last has come
        codes = [post_bytes(url, request_body(training.model_id, 10 + i)).status_code for i in range(8)]
        assert codes == [200] * 5 + [429] * 3
        backend.is_held = False
        second = client(url, KEYS[1]).create_lora_training_client(base_model=NAME, rank=8).result()
        assert value_of(second) >= 0


@pytest.mark.parametrize("seed", [0, 2**31, 2**45, 2**63 - 1, -1, -(2**63)])
def test_a_seed_reaches_the_backend_as_it_is(server, seed):
    url, service = server
    client(url).create_lora_training_client(base_model=NAME, rank=8, seed=seed).result()
    assert service.backend.seeds == [seed]


def test_a_telemetry_of_any_kind_is_taken(server):
    assert post(server[0], "telemetry", {"events": [{"x": 1}]}).json() == {"status": "accepted"}
    assert json.loads(post(server[0], "client/config", {"sdk_version": "0"}).text) == {}
