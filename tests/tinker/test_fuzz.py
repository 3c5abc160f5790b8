"""Any body to any route: an answer, never a 500; and the server is what it was."""

import json

import httpx
import pytest

pytest.importorskip("tinker", reason="needs the extra `serve`")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tinker.fakes import KEYS, NAME, serving
from tests.tinker.test_protocol import ADAM, client, datum, post_bytes, request_body, value_of

pytestmark = pytest.mark.filterwarnings("ignore")
FIELDS = ["type", "tokens", "rank", "seed", "path", "chunks"]
NASTY = [
    None, True, 0, -1, 3, 2**31, 2**63, 10**30, 0.5, 1e308, "", "\ud800", "\0", "../..", "x" * 5000, [], {}, [[]], [None],
    ["\ud800"], {"\ud800": "\0"}, [10**30], {"type": "image"}, "tinker://a/weights/..",
]  # fmt: skip
_LEAF = st.sampled_from(NASTY)
_STRINGS = st.sampled_from([value for value in NASTY if isinstance(value, str)])
_NUMBERS = st.sampled_from([value for value in NASTY if isinstance(value, int | float)])
_VALUE = _LEAF | st.recursive(
    _LEAF,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory, database_kind):
    with serving(tmp_path_factory.mktemp("fuzz") / "server") as (url, _):
        training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
        yield url, training


@pytest.fixture(scope="module", autouse=True)
def bystander(server):
    """A model of the same tenant, which no fuzzed body names, and what its weights are after a step."""
    training = client(server[0]).create_lora_training_client(base_model=NAME, rank=8, seed=7).result()
    training.forward_backward([datum()], "cross_entropy").result()
    training.optim_step(ADAM).result()
    return training, value_of(training)


def bodies(training):
    """A good body for each route."""
    session = training.model_id.split(":")[0]
    params = {"max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 1, "stop": ["a"]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    targets = {
        "data": [1, 2], "dtype": "int64", "shape": [1, 2],
        "sparse_crow_indices": [0, 2], "sparse_col_indices": [0, 1],
    }  # fmt: skip
    lora = {"rank": 4, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
    of_model = {"model_id": training.model_id, "seq_id": 5}
    adam = {
        "learning_rate": 0.0,
        "beta1": 0.9,
        "beta2": 0.9,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    return {
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0", "display_name": "x"},
        "session_heartbeat": {"session_id": session},
        "create_model": {
            "session_id": session, "model_seq_id": 3, "base_model": NAME, "lora_config": lora,
            "user_metadata": {"a": "b"},
        },
        "get_info": {"model_id": training.model_id},
        "optim_step": {**of_model, "adam_params": adam},
        "save_weights": {**of_model, "path": "name", "ttl_seconds": 4000, "overwrite": True},
        "save_weights_for_sampler": {**of_model, "sampling_session_seq_id": 9, "kind": "inflight"},
        "save_weights_external": {
            **of_model, "path": "name", "ttl_seconds": 4000, "age_encryption_recipients": [],
        },
        "load_weights": {
            "session_id": session, "model_seq_id": 8, "path": f"tinker://{training.model_id}/weights/kept",
            "optimizer": True, "base_model": NAME,
        },
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 77, "base_model": NAME},
        "asample": {
            "sampling_session_id": f"{session}:sample:77", "seq_id": 1, "num_samples": 2, "prompt": prompt,
            "sampling_params": params, "prompt_logprobs": True, "topk_prompt_logprobs": 1,
            "prompt_logprobs_last_n": 1, "prompt_alt_tokens_k": 2, "target_prompt_logprobs": targets,
        },
        "retrieve_future": {"request_id": f"{training.model_id}:0"},
        "retrieve_futures": {
            "target": {"sampling_session_id": f"{session}:sample:77"}, "prev_cursor": 0, "timeout": 0.1,
            "retrieved_request_ids": ["x"],
        },
        "copy_weights": {
            "session_id": session, "model_seq_id": 9, "ttl_seconds": 4000,
            "source_path": f"tinker://{training.model_id}/weights/kept",
        },
        "cancel_future": {"request_id": f"{training.model_id}:0"},
        "weights_info": {"tinker_path": f"tinker://{training.model_id}/weights/kept"},
        f"sessions/{session}/finish": {"reason": {"type": "x"}, "detail": "y"},
        "telemetry": {"events": []},
        "client/config": {"sdk_version": "0"},
    }  # fmt: skip


def paths(body, before=()):
    """Every place in a body."""
    yield before
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in inner:
        yield from paths(value, (*before, key))


def at(body, path):
    return at(body[path[0]], path[1:]) if path else body


def like(value):
    """Of its type: what a schema lets through."""
    return _STRINGS if isinstance(value, str) else _NUMBERS if isinstance(value, int | float) else _VALUE


def changed(body, path, value):
    if not path:
        return value
    copy = body.copy()
    copy[path[0]] = changed(body[path[0]], path[1:], value)
    return copy


def post_any(url, route, body):
    headers = {"X-API-Key": KEYS[0], "Content-Type": "application/json"}
    return httpx.post(f"{url}/api/v1/{route}", content=json.dumps(body).encode(), headers=headers, timeout=30)


def test_the_bodies_are_good_as_they_are(server):
    url, training = server
    training.save_state("kept").result()
    for route, body in bodies(training).items():
        answer = post_any(url, route, body)
        assert answer.status_code in (200, 204), (route, answer.text)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_is_a_500(server, data):
    url, training = server
    route, body = data.draw(st.sampled_from(sorted(bodies(training).items(), key=lambda item: item[0])))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(sorted(paths(body), key=repr)))
        same_type = data.draw(st.booleans())
        body = changed(body, path, data.draw(like(at(body, path)) if same_type else _VALUE))
    answer = post_any(url, route, body)
    assert answer.status_code < 500, (route, body, answer.text)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damaged_protobuf_is_a_500(server, data):
    url, training = server
    body = bytearray(request_body(training.model_id, data.draw(st.integers(1, 2**30))))
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    answer = post_bytes(url, bytes(body[:cut]))
    assert answer.status_code < 500, answer.text


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    path=st.lists(
        st.sampled_from(
            [
                "training_runs",
                "checkpoints",
                "weights",
                "..",
                "%2e%2e",
                "publish",
                "ttl",
                "sessions",
                "a",
                "%00",
                "samplers",
                "downloads",
                "external_weights",
                "external_weights_urls",
            ]
        ),
        max_size=6,
    ),
)
def test_no_path_is_a_500(server, method, path):
    answer = httpx.request(
        method,
        f"{server[0]}/api/v1/{'/'.join(path)}",
        headers={"X-API-Key": KEYS[0]},
        params={"limit": -1, "offset": 9},
    )
    assert answer.status_code < 500, (method, path, answer.text)


def test_another_model_is_what_it_was(server, bystander):
    training, before = bystander
    training.forward_backward([datum()], "cross_entropy").result()
    assert value_of(training) == before != 7


def test_a_new_model_is_served(server):
    training = client(server[0]).create_lora_training_client(base_model=NAME, rank=8, seed=5).result()
    assert value_of(training) == 5
