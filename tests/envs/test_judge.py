"""A judge behind a URL: graded, compared, retried, and never a grade that it did not give."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl.envs.judge import Judge, JudgeFailed


@contextmanager
def endpoint(*replies):
    """Answers with each reply in turn: a text, or a status."""
    asked, left = [], list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            asked[-1]["key"] = self.headers["authorization"]
            reply = left.pop(0)
            self.send_response(reply if isinstance(reply, int) else 200)
            self.end_headers()
            if isinstance(reply, str):
                self.wfile.write(json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_grade_is_the_last_number_of_the_reply(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "k3y")
    with endpoint("It has 2 faults. 7.5") as (url, asked):
        verdict = Judge(url, "m", rubric="From 0 to 10.").grade("2 + 2?", "4")
    assert verdict.grade == 0.75 and verdict.said == "It has 2 faults. 7.5"
    assert asked[0]["temperature"] == 0 and asked[0]["key"] == "Bearer k3y"
    assert "2 + 2?" in asked[0]["messages"][1]["content"]


@pytest.mark.parametrize(
    ("replies", "preferred"), [(("1", "2"), 1), (("2", "1"), 0), (("1", "1"), 0.5), (("2", "2"), 0.5)]
)
def test_a_comparison_is_asked_in_both_orders(replies, preferred):
    with endpoint(*replies) as (url, asked):
        assert Judge(url, "m").prefers_first("q", "first", "second") == preferred
    assert asked[0]["messages"][1]["content"].index("first") < asked[0]["messages"][1]["content"].index(
        "second"
    )
    assert asked[1]["messages"][1]["content"].index("second") < asked[1]["messages"][1]["content"].index(
        "first"
    )


def test_it_is_asked_again_where_it_is_busy_and_a_missing_grade_is_none():
    with endpoint(503, "4") as (url, asked):
        assert Judge(url, "m").grade("q", "a").grade == 0.4 and len(asked) == 2
    with endpoint(401) as (url, _), pytest.raises(JudgeFailed, match="401"):
        Judge(url, "m").grade("q", "a")
    for said in ("fine", "11", "-1"):
        with endpoint(said) as (url, _), pytest.raises(JudgeFailed, match="gave no grade from 0 to 10"):
            Judge(url, "m").grade("q", "a")
    with pytest.raises(JudgeFailed, match="did not answer within 1 s"):
        Judge("http://127.0.0.1:9/v1", "m", seconds=1.0).grade("q", "a")
