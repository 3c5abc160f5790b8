"""What is refused before it changes anything, and in which words: checkpoints that do not fit or have expired, settings out of bounds."""

# holds: exact, the fake backend counts in float64

import math

import pytest

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")
from tinker import types  # noqa: E402

from rl.tinker.backend import NotFound, UserError  # noqa: E402
from rl.tinker.database import Database, checkpoints, now  # noqa: E402
from rl.tinker.limits import Limits  # noqa: E402
from rl.tinker.paths import CheckpointPath  # noqa: E402
from rl.tinker.service import Service  # noqa: E402
from tests.tinker.fakes import KEYS, NAME, FakeBackend, serving  # noqa: E402
from tests.tinker.test_optional_routes import PARAMS, PROMPT, copy, logprob, trained  # noqa: E402
from tests.tinker.test_protocol import client, datum, post, value_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "server") as (url, service):
        yield url, service


def test_a_checkpoint_of_another_shape_is_refused_and_changes_nothing(server):
    url, service = server
    training = trained(url)
    larger = client(url).create_lora_training_client(base_model=NAME, rank=16, seed=1).result()
    narrow = client(url).create_lora_training_client(base_model=NAME, rank=8, train_mlp=False).result()
    before = list(service.backend.log)
    for other, match in [
        (larger, "has rank 16 and the model rank 8; load it into a new model"),
        (narrow, r"trains \['k_proj', .* and the model .*; load it into a new model"),
    ]:
        path = other.save_state("one").result().path
        for load in (training.load_state, training.load_state_with_optimizer):
            with pytest.raises(Exception, match=match):
                load(path).result()
    sampled = training.save_weights_for_sampler("s").result().path
    with pytest.raises(Exception, match="has weights for sampling alone; load it without its optimizer"):
        training.load_state_with_optimizer(sampled).result()
    assert {what for what, *_ in service.backend.log[len(before) :]} == {"save"}
    assert value_of(training) == pytest.approx(0.3)
    training.load_state(sampled).result()  # the same weights, with a new optimizer


def test_the_cookbooks_rank_is_within_the_default_limit(server):
    training = client(server[0]).create_lora_training_client(base_model=NAME, rank=64).result()
    assert training.get_info().lora_rank == 64 == Limits().max_rank
    with pytest.raises(Exception, match="a LoRA rank of 65; this server takes 1 to 64"):
        client(server[0]).create_lora_training_client(base_model=NAME, rank=65).result()


@pytest.mark.parametrize("public", [False, True])
def test_an_expired_checkpoint_is_gone_at_each_access(server, monkeypatch, public):
    """Without any sweep."""
    url, _ = server
    training = trained(url)
    path = training.save_state("best").result().path
    rest = tinker.RestClient(base_url=url, api_key=KEYS[0])
    if public:
        rest.publish_checkpoint_from_tinker_path(path).result()
    sampler = client(url).create_sampling_client(model_path=path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    session = training.model_id.split(":")[0]
    copied = copy(url, session, 7, path, ttl_seconds=4000).json()["tinker_path"]
    assert sampler.sample(PROMPT, 1, PARAMS).result()
    later = now() + 3700
    monkeypatch.setattr("rl.tinker.checkpoints.now", lambda: later)
    for refused in (
        lambda: client(url).create_training_client_from_state(path).result(),
        lambda: client(url).create_sampling_client(model_path=path).result(),
        lambda: training.load_state(path).result(),
        lambda: sampler.sample(PROMPT, 1, PARAMS).result(),
        lambda: rest.get_weights_info_by_tinker_path(path).result(),
        lambda: rest.publish_checkpoint_from_tinker_path(path).result(),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(path).result(),
    ):
        with pytest.raises(Exception, match="no checkpoint"):
            refused()
    assert copy(url, session, 7, path).status_code == 404
    assert [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints] == [copied]
    assert not rest.list_checkpoints(training.model_id).result().checkpoints
    assert rest.get_training_run(training.model_id).result().last_checkpoint is None
    # Its name is free again, also before a sweep.
    assert training.save_state("best").result().path == path
    assert logprob(url, path) == pytest.approx(-0.3)


def test_no_method_hands_out_an_expired_row(tmp_path):
    """An enumeration: whatever a method of Checkpoints returns, nothing in it has expired."""
    database = Database(f"sqlite:///{tmp_path}/server.db?check_same_thread=false")
    service = Service(database, FakeBackend(), tmp_path, (NAME,), (0,))
    for name, expires in [("old", now() - 1), ("fresh", now() + 99), ("kept", None)]:
        path = CheckpointPath.make("s:train:0", "weights", name)
        database.insert(
            checkpoints, path=str(path), model="s:train:0", tenant="t", kind="weights", name=name, request=name,
            directory=name, lora={}, created=now(), num_bytes=1, public=True, expires=expires, user_metadata=None,
        )  # fmt: skip
    owned = service.checkpoints
    assert {row.name for row in owned.list("t")} == {row.name for row in owned.list("t", "s:train:0")}
    assert {row.name for row in owned.list("t")} == {"fresh", "kept"}
    for tenant in ("t", "other"):
        assert owned.readable(tenant, "tinker://s:train:0/weights/fresh").name == "fresh"
        with pytest.raises(NotFound):
            owned.readable(tenant, "tinker://s:train:0/weights/old")
    assert owned.own("t", "s:train:0", "weights", "kept").name == "kept"
    with pytest.raises(NotFound):
        owned.own("t", "s:train:0", "weights", "old")
    database.close()


ADAM = {
    "learning_rate": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


@pytest.mark.parametrize("name", ADAM)
def test_each_number_of_adam_has_its_own_message(server, name):
    service = server[1]
    allowed = "0 to 1, without 1" if "beta" in name else "finite and at least 0"
    for value in (math.nan, math.inf, -0.5):
        with pytest.raises(UserError) as refused:
            service.optim_step("tenant", "model", 1, {**ADAM, name: value})
        assert str(refused.value) == f"{name}={value}; it has to be {allowed}"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0; it has to be 0 to 100"),
        ({"temperature": 101.0}, "temperature=101.0; it has to be 0 to 100"),
        ({"top_p": 0.0}, "top_p=0.0; it has to be over 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5; it has to be over 0 and at most 1"),
        ({"top_k": 0}, "top_k=0; it has to be at least 1, or -1 for all tokens"),
        ({"stop": [3, 128]}, "the stop token 128 is outside the vocabulary of 128"),
        ({"stop": [-1]}, "the stop token -1 is outside the vocabulary of 128"),
    ],
)
def test_each_setting_of_sampling_has_its_own_message(server, params, message):
    url, _ = server
    sampler = client(url).create_sampling_client(base_model=NAME).result()
    body = {"sampling_session_id": sampler._sampling_session_id, "seq_id": 1, "num_samples": 1}
    body |= {"prompt": PROMPT.model_dump(), "sampling_params": types.SamplingParams().model_dump() | params}
    answer = post(url, "asample", body)
    assert (answer.status_code, answer.json()["error"]) == (422, message)


def test_the_sdk_sends_thresholds_of_each_token(server):
    training = client(server[0]).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    inputs = {"logprobs": [0.0] * 3, "advantages": [1.0] * 3, "clip_high_threshold": [1.0, 1.5, 3.0]}
    for loss in ("ppo", "cispo", "gspo"):
        good = datum(**inputs, clip_low_threshold=[0.0, 0.5, 1.0])
        assert "loss:sum" in training.forward_backward([good], loss).result().metrics
        for bad, match in [
            (datum(**inputs, clip_low_threshold=[0.0, 0.5, 1.5]), "clip_low_threshold has 1.5"),
            (datum(logprobs=[0.0] * 3, advantages=[1.0] * 3), "datum 1 has no clip_low_threshold"),
        ]:
            with pytest.raises(tinker.RequestFailedError, match=match):
                training.forward_backward([good, bad], loss).result()
    with pytest.raises(tinker.RequestFailedError, match="does not read"):
        training.forward_backward([datum(**inputs)], "importance_sampling").result()
