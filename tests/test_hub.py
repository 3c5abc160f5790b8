"""Models and data by their id, from a stand-in for the Hub on this machine; then offline, from the cache."""

import hashlib
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler

import pytest

from rl import hub as module
from rl.envs.sort_letters import ALPHABET
from rl.models.sources import TinyQwen3
from tests.json_server import serving
from tests.tiny import write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = "".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(5))
ASK = """
import contextlib, json, sys, urllib.error, urllib.request
from rl.config.settle import _facts
from rl.envs.question_file import QuestionFile
from rl.errors import ConfigError
from rl.models.sources import ModelDir
path, data, looked = sys.argv[1:]
without = ModelDir(path).without_weights()  # as a command that starts nothing reads it
answer = {}
if not without.validate():
    assert without.tokenizer().encode_plain("ab")
    answer["layers"] = len(_facts(without).layers)
if looked:
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(looked)
model = ModelDir(path)
env = QuestionFile(path=data, num_eval=2)
answer |= {"model": model.validate(), "env": env.validate()}
if answer["model"] == answer["env"] == []:
    answer |= {"hidden_size": model.config()["hidden_size"], "questions": [p.question for p in env.eval_problems()]}
print(json.dumps(answer))
"""


@pytest.fixture
def hub(tmp_path):
    """A server with the model me/tiny and the dataset me/sums; and the paths that it was asked for."""
    TinyQwen3(alphabet=ALPHABET).materialize(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "model" / "training_notes.pt").write_bytes(b"not asked for")
    files = {f"/me/tiny/resolve/{COMMIT}/{p.name}": p.read_bytes() for p in (tmp_path / "model").iterdir()}
    files |= {f"/datasets/me/sums/resolve/main/{name}": ROWS.encode() for name in ("train.jsonl",)}
    siblings = [{"rfilename": p.name} for p in (tmp_path / "model").iterdir()]
    info = {
        "id": "me/tiny",
        "sha": COMMIT,
        "siblings": siblings,
        "private": False,
        "tags": [],
        "downloads": 0,
    }
    tree = [
        {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0"}
        for p in (tmp_path / "model").iterdir()
    ]
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body):
            path = self.path.split("?")[0]
            asked.append((path, self.headers.get("Authorization")))
            if path in ("/api/models/me/tiny", "/api/models/me/tiny/revision/main"):
                data, headers = json.dumps(info).encode(), {"Content-Type": "application/json"}
            elif path == f"/api/models/me/tiny/tree/{COMMIT}":
                data, headers = json.dumps(tree).encode(), {"Content-Type": "application/json"}
            elif path in files:
                data = files[path]
                headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            else:
                data, headers = b"{}", {"X-Error-Code": "RepoNotFound"}
            self.send_response(404 if "X-Error-Code" in headers else 200)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    with serving(Handler) as server:
        yield f"http://127.0.0.1:{server.server_port}", asked


def ask(tmp_path, model, data, looked="", **environment):
    """looked: a URL that is fetched before the weights may be."""
    environment |= {
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_TOKEN": "hf_me",
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK, model, data, looked],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_and_data_by_id_with_a_token_and_then_offline(hub, tmp_path):
    """A command that starts nothing fetches no weights, and sees those that are here."""
    endpoint, asked = hub
    data = "hf://datasets/me/sums/train.jsonl"
    expected = {"model": [], "env": [], "hidden_size": 64, "questions": ["0+1", "1+1"]}
    first = ask(tmp_path, "me/tiny", data, f"{endpoint}/looked", HF_ENDPOINT=endpoint)
    assert first == expected | {"layers": 0}
    paths = [path for path, _ in asked]
    before, after = (paths[: paths.index("/looked")], paths[paths.index("/looked") :])
    assert any(path.endswith("config.json") for path in before)
    assert not any(path.endswith(".safetensors") for path in before)
    assert any(path.endswith("model.safetensors") for path in after)
    assert not any(path.endswith(".pt") for path in paths)
    assert {token for path, token in asked if "/me/" in path} == {"Bearer hf_me"}
    asked.clear()
    again = ask(tmp_path, "me/tiny", data, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert again == expected | {"layers": 7}
    assert not asked


def test_what_is_not_there_is_named(hub, tmp_path):
    answer = ask(tmp_path, "me/none", "hf://datasets/me/none/train.jsonl", HF_ENDPOINT=hub[0])
    assert "'me/none' is no directory here, and could not be fetched from the Hub" in answer["model"][0]
    assert "hf://datasets/me/none/train.jsonl could not be fetched" in answer["env"][0]
    answer = ask(tmp_path, "me/none", "hf://datasets/me/none", HF_ENDPOINT=hub[0])
    assert "names no file" in answer["env"][0]


@pytest.mark.parametrize(
    ("path", "repository", "file"),
    [
        ("owner/name/a.jsonl", "owner/name", "a.jsonl"),
        ("owner/name/data/a.jsonl", "owner/name", "data/a.jsonl"),
        ("owner/name@v1/data/a.jsonl", "owner/name@v1", "data/a.jsonl"),
        ("owner/name@refs/convert/parquet/default/0000.parquet", "owner/name@refs/convert/parquet", "default/0000.parquet"),
        ("owner/name@refs/pr/3/a.jsonl", "owner/name@refs/pr/3", "a.jsonl"),
    ],
)  # fmt: skip
def test_which_part_of_a_datasets_path_is_the_revision(monkeypatch, path, repository, file):
    monkeypatch.setattr(module, "_download", lambda *asked: asked)
    assert module.data_file(f"hf://datasets/{path}") == (repository, file)
