"""What the official client asks for only when it is told to: copies of weights, and one poll for a whole sampling session."""

# holds: exact, the fake backend counts in float64

from datetime import datetime

import httpx
import pytest

from rl.tinker.database import now

tinker = pytest.importorskip("tinker", reason="needs the extra `serve`")
from tinker import types  # noqa: E402

from tests.tinker.fakes import KEYS, NAME, FakeBackend, serving  # noqa: E402
from tests.tinker.test_protocol import client, post  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
PARAMS = types.SamplingParams(max_tokens=2, seed=5)
PROMPT = types.ModelInput.from_ints([5])


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "server") as (url, service):
        yield url, service


def trained(url):
    """A client whose model is 0.3."""
    training = client(url).create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]}
    )
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    return training


def copy(url, session, number, path, key=KEYS[0], **more):
    body = {"session_id": session, "model_seq_id": number, "source_path": path, **more}
    return post(url, "copy_weights", body, key)


def logprob(url, path, key=KEYS[0]):
    sampler = client(url, key).create_sampling_client(model_path=path).result()
    return sampler.sample(PROMPT, 1, PARAMS).result().sequences[0].logprobs[0]


def test_a_copy_is_its_own_checkpoint(server):
    url, _ = server
    training = trained(url)
    source = training.save_state("best").result().path
    session = training.model_id.split(":")[0]
    first, again = (copy(url, session, 7, source, ttl_seconds=5000).json()["tinker_path"] for _ in range(2))
    assert first == again and first.startswith(f"tinker://{session}:train:7/weights/best-copy-")
    rest = tinker.RestClient(base_url=url, api_key=KEYS[0])
    listed = rest.list_checkpoints(f"{session}:train:7").result().checkpoints
    assert [c.tinker_path for c in listed] == [first] and listed[0].expires_at
    rest.delete_checkpoint_from_tinker_path(source).result()
    assert logprob(url, first) == pytest.approx(-0.3)
    goes_on = client(url).create_training_client_from_state_with_optimizer(first).result()
    assert goes_on.get_info().lora_rank == 8


def test_what_another_tenant_published_can_be_copied(server):
    url, _ = server
    source = trained(url).save_weights_for_sampler("shared").result().path
    theirs = client(url, KEYS[1]).create_lora_training_client(base_model=NAME, rank=8, seed=1).result()
    session = theirs.model_id.split(":")[0]
    assert copy(url, session, 3, source, KEYS[1]).status_code == 404
    tinker.RestClient(base_url=url, api_key=KEYS[0]).publish_checkpoint_from_tinker_path(source).result()
    path = copy(url, session, 3, source, KEYS[1]).json()["tinker_path"]
    assert logprob(url, path, KEYS[1]) == pytest.approx(-0.3)
    assert post(url, "weights_info", {"tinker_path": path}).status_code == 404  # not published itself


def test_a_copy_without_a_place_is_refused(server):
    url, _ = server
    training = trained(url)
    path = training.save_state("best").result().path
    answer = post(url, "copy_weights", {"source_path": path, "destination_project_id": "p"})
    assert answer.status_code == 422 and "needs session_id and model_seq_id" in answer.json()["error"]
    session = training.model_id.split(":")[0]
    assert "ttl_seconds" in copy(url, session, 7, path, ttl_seconds=-1).json()["error"]
    copy(url, session, 7, path)
    body = {"session_id": session, "model_seq_id": 7, "base_model": NAME, "lora_config": {"rank": 8}}
    answer = post(url, "create_model", body)
    assert answer.status_code == 422 and "take another model_seq_id" in answer.json()["error"]


def test_projects_are_refused_by_name(server):
    url, _ = server
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "project_id": "p"}
    answer = post(url, "create_session", body)
    assert answer.status_code == 422 and "leave project_id out" in answer.json()["error"]
    session = client(url).create_lora_training_client(base_model=NAME).result().model_id.split(":")[0]
    headers = {"X-API-Key": KEYS[0]}
    answer = httpx.put(f"{url}/api/v1/sessions/{session}/project", json={"project_id": "p"}, headers=headers)
    assert answer.status_code == 422 and "is not offered by this server" in answer.json()["error"]


def test_one_poll_for_a_whole_session(server, monkeypatch):
    """By the SDK's own poller, which it uses where a server's configuration says so."""
    monkeypatch.setattr(
        types.ClientConfigResponse.model_fields["sample_use_retrieve_futures"], "default", True
    )
    types.ClientConfigResponse.model_rebuild(force=True)
    url, service = server
    asked = []
    ended_after = service.queue.ended_after

    def noted(target, *args):
        asked.append(target)
        return ended_after(target, *args)

    monkeypatch.setattr(service.queue, "ended_after", noted)
    try:
        service.backend.delay = 0.05
        sampler = client(url).create_sampling_client(base_model=NAME).result()
        futures = [sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, seed=i)) for i in range(20)]
        found = [future.result().sequences[0].tokens for future in futures]
        assert found == [[i, i + 1] for i in range(20)]
        assert set(asked) == {sampler._sampling_session_id}
    finally:
        monkeypatch.undo()
        types.ClientConfigResponse.model_rebuild(force=True)


def test_a_poll_says_what_ended_since_its_cursor_whatever_the_clock_does(tmp_path, monkeypatch):
    def ended(url, id, cursor, timeout=5.0, clone=0):
        target = {"sampling_session_id": id, "cloned_sampler_id": clone}
        body = {"target": target, "prev_cursor": cursor, "timeout": timeout}
        answer = post(url, "retrieve_futures", body, timeout=30).json()
        return [(c["request_id"].rpartition(":")[2], c["state"]) for c in answer["completions"]], answer[
            "cursor"
        ]

    def first_end(url, id, clone):
        """Polls end also when a request of another clone does."""
        completions, cursor = [], 0
        while not completions:
            completions, cursor = ended(url, id, cursor, clone=clone)
        return completions

    def ask(url, id, seq_id, **params):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
        sent = {"sampling_session_id": id, "seq_id": seq_id, "prompt": prompt, "num_samples": 1}
        assert (
            post(url, "asample", sent | {"sampling_params": {"max_tokens": 2, **params}}).status_code == 200
        )

    with serving(tmp_path / "server") as (url, _):
        id = client(url).create_sampling_client(base_model=NAME).result()._sampling_session_id
        ask(url, id, 1)
        ask(url, id, 1_000_000_002)  # a clone's
        assert first_end(url, id, clone=1) == [("1000000002", "finished")]
        assert first_end(url, id, clone=0) == [("1", "finished")]
        found, cursor = ended(url, id, 0)
        assert found == [("1", "finished")]
        assert ended(url, id, cursor, timeout=0.2) == ([], cursor)
        monkeypatch.setattr("rl.tinker.requests.now", lambda: 1000.0)
        ask(url, id, 3)
        found, cursor = ended(url, id, cursor)
        assert found == [("3", "finished")]
    monkeypatch.undo()
    monkeypatch.setattr("rl.tinker.requests.now", lambda: 1000.0)

    class Broken(FakeBackend):
        async def sample(self, *args):
            raise RuntimeError("no")

    with serving(tmp_path / "server", backend=Broken()) as (url, _):
        ask(url, id, 4)
        assert ended(url, id, cursor)[0] == [("4", "failed")]


def test_what_a_tenant_has_is_told_with_its_layers_and_times(server):
    url, _ = server

    def get(path):
        return httpx.get(f"{url}/api/v1/{path}", headers={"X-API-Key": KEYS[0]}).raise_for_status().json()

    def seconds(text):
        return datetime.fromisoformat(text).timestamp()

    training = trained(url)
    path = training.save_state("best").result().path
    sampler = client(url).create_sampling_client(model_path=path).result()._sampling_session_id
    first, second = training.model_id.split(":")[0], sampler.split(":")[0]
    listed = get("sessions")["sessions"]
    assert listed.index(second) < listed.index(first)
    assert get(f"sessions/{first}")["training_run_ids"] == [training.model_id]
    assert get(f"sessions/{second}")["sampler_ids"] == [sampler]
    assert get(f"samplers/{sampler}") == {"sampler_id": sampler, "base_model": NAME, "model_path": path}

    run = f"training_runs/{training.model_id}"
    assert abs(seconds(get(run)["last_request_time"]) - now()) < 600
    ends = []
    for ttl in (3600, 2**62, None):
        body, headers = {"ttl_seconds": ttl}, {"X-API-Key": KEYS[0]}
        answer = httpx.put(f"{url}/api/v1/{run}/checkpoints/weights/best/ttl", json=body, headers=headers)
        assert answer.status_code == 204
        (checkpoint,) = get(f"{run}/checkpoints")["checkpoints"]
        ends.append(checkpoint["expires_at"])
    assert abs(seconds(ends[0]) - now() - 3600) < 600 and ends[1:] == ["9999-12-31T23:59:59+00:00", None]

    attention = client(url).create_lora_training_client(base_model=NAME, rank=4, train_mlp=False).result()
    for made, rank, has_mlp in ((training, 8, True), (attention, 4, False)):
        state = made.save_state("layers").result().path
        assert post(url, "weights_info", {"tinker_path": state}).json() == {
            "base_model": NAME, "is_lora": True, "lora_rank": rank, "train_unembed": False,
            "train_mlp": has_mlp, "train_attn": True,
        }  # fmt: skip
