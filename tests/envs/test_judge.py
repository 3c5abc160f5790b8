"""A judge behind a URL: graded, compared, retried, and never a grade that it did not give."""

import json
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

import pytest

from rl.envs.judge import Judge, JudgeFailed, JudgeUnreachable
from tests.json_server import JSONHandler, completion, serving


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

    with serving(Handler) as server:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked


def test_a_grade_is_the_whole_reply_which_a_schema_holds(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "k3y")
    with endpoint('{"grade": 7.5}') as (url, asked):
        verdict = Judge(url, "m", rubric="From 0 to 10.").grade("2 + 2?", "4")
    assert verdict.grade == 0.75 and verdict.answer == '{"grade": 7.5}'
    schema = asked[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"] == {"grade": {"type": "number", "minimum": 0, "maximum": 10}}
    assert asked[0]["messages"][0]["content"].startswith("From 0 to 10.\nReply with JSON alone")
    assert asked[0]["temperature"] == 0 and asked[0]["key"] == "Bearer k3y"
    assert "2 + 2?" in asked[0]["messages"][1]["content"]


@pytest.mark.parametrize(
    ("replies", "preferred"),
    [(('{"better": 1}', "2"), 1), (("2", "1"), 0), (("1", "1"), 0.5), (("2", "2"), 0.5)],
)
def test_a_comparison_is_asked_in_both_orders(replies, preferred):
    with endpoint(*replies) as (url, asked):
        assert Judge(url, "m").prefers_first("q", "first", "second") == preferred
    schema = asked[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"] == {"better": {"type": "integer", "enum": [1, 2]}}  # OpenAI asks for a type
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
    with pytest.raises(JudgeFailed, match=r"gave no reply \(tries: \d, the last: ConnectError: "):
        Judge("http://127.0.0.1:9/v1", "m", seconds=1.0).grade("q", "a")


class Slow(JSONHandler):
    """Verdicts that take 0.7 s: at once after it, or bit by bit."""

    def do_POST(self):
        self.body()
        if self.path.startswith("/at_once"):
            time.sleep(0.7)
        data = json.dumps(completion({"content": '{"better": 1}'})).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        with suppress(BrokenPipeError):  # whoever asked has gone
            for byte in data:
                self.wfile.write(bytes([byte]))
                if self.path.startswith("/in_bits"):
                    time.sleep(0.7 / 20)


@pytest.mark.parametrize("how", ["at_once", "in_bits"])
def test_its_seconds_bound_the_whole_verdict(how):
    """A comparison's two questions together, and each reply to its end. Others rely on it."""
    with serving(Slow) as server:
        judge = Judge(f"http://127.0.0.1:{server.server_port}/{how}", "m", seconds=1.0)
        began = time.monotonic()
        late = r"did not answer within 1 s .*; where it is slow, raise its seconds, and reward.limit_seconds "
        with pytest.raises(JudgeUnreachable, match=late):
            judge.prefers_first("q", "first", "second")
        assert time.monotonic() - began < 1.6


def test_its_seconds_bound_the_look_up_of_its_name_too(monkeypatch):
    def slow(*arguments, **settings):
        time.sleep(4)
        raise OSError("no such host")

    monkeypatch.setattr("socket.getaddrinfo", slow)
    began = time.monotonic()
    with pytest.raises(JudgeUnreachable, match="did not answer within 0.5 s"):
        Judge("http://judge.invalid/v1", "m", seconds=0.5).grade("q", "a")
    assert time.monotonic() - began < 3  # holds: clock, the look-up takes 4 s


def test_a_question_for_which_no_time_is_left_is_late():
    with pytest.raises(JudgeUnreachable, match=r"did not answer within 30 s \(tries: 0, "):
        Judge("http://127.0.0.1:9/v1", "m").complete([], deadline=time.monotonic())


def test_a_judge_that_is_busy_to_the_last_try_is_not_said_to_be_slow():
    with endpoint(503, 503) as (url, _), pytest.raises(JudgeUnreachable) as failed:
        Judge(url, "m", max_retries=1).grade("q", "a")
    assert "gave no reply (tries: 2, the last: 503" in str(failed.value)
    assert "30 s" not in str(failed.value) and "seconds" not in str(failed.value)


NO_GRADES = [
    "7/10", "fine", "11", "-1", "It has 2 faults. 7.5", "7 of 10", "Grade: 7", '{"grade": "7"}', '{"grade": true}',
    '{"grade": 7, "of": 10}', '{"mark": 7}', '{"grade": NaN}', "[7]", "", "None", '{"grade": 7', "[" * 5000, "1e999",
]  # fmt: skip
NO_PREFERENCES = [
    "Answer 1 is better than Answer 2",
    "1 and 2",
    "0",
    "3",
    "1.5",
    '{"better": true}',
    '{"grade": 1}',
    "",
]


@pytest.mark.parametrize("structured", [True, False])
def test_a_reply_in_any_other_form_is_no_verdict(structured):
    for said in NO_GRADES:
        with pytest.raises(JudgeFailed, match="did not reply with a grade from 0 to 10") as failed:
            Scripted(said, structured=structured).grade("q", "a")
        assert ("max_tokens" if structured else "structured=True") in str(failed.value)
        assert not isinstance(failed.value, JudgeUnreachable)  # the policy may bring it about: its score
    for said in NO_PREFERENCES:
        with pytest.raises(JudgeFailed, match="did not reply with 1 or 2"):
            Scripted(said, structured=structured).prefers_first("q", "a", "b")
    for said, grade in (("7", 0.7), ('<think>3 or 4</think>\n{"grade": 0}', 0.0), (' {"grade": 10}\n', 1.0)):
        assert Scripted(said, structured=structured).grade("q", "a").grade == grade


@dataclass(frozen=True)
class Scripted(Judge):
    """Always replies with its base_url."""

    def complete(self, messages, schema=None, deadline=None):
        assert (schema is not None) == self.structured
        return self.base_url


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_judge_that_refuses_the_question_gave_no_verdict(status):
    """The policy may have brought it about by an answer that is too long: it is its score."""
    with endpoint(status) as (url, _), pytest.raises(JudgeFailed, match=f"refused .* {status}") as failed:
        Judge(url, "m").grade("q", "a")
    assert not isinstance(failed.value, JudgeUnreachable)
    assert "structured=False" in str(failed.value)  # an endpoint may know no response_format
    for other in (401, 404):
        with endpoint(other) as (url, _), pytest.raises(JudgeUnreachable, match=str(other)):
            Judge(url, "m").grade("q", "a")


def test_a_judge_that_reasons_is_asked_in_its_own_fields():
    with endpoint('{"grade": 5}', 400) as (url, asked):
        assert Judge(url, "m", reasoning=True, max_tokens=900).grade("q", "a").grade == 0.5
        with pytest.raises(
            JudgeFailed, match="structured=False .*, or reasoning=True where it takes no max_t"
        ):
            Judge(url, "m").grade("q", "a")
    assert asked[0]["max_completion_tokens"] == 900 and not {"max_tokens", "temperature"} & asked[0].keys()
    assert asked[1]["max_tokens"] == 64 and asked[1]["temperature"] == 0
    assert "max_completion_tokens" not in asked[1]


def test_the_runs_own_judge_is_reached_without_the_machines_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with endpoint('{"grade": 10}') as (url, _):
        monkeypatch.setenv("RL_JUDGE_URL", url)
        assert Judge(max_retries=0).grade("q", "a").grade == 1
        with pytest.raises(JudgeUnreachable):  # one of the user's goes where the environment says
            Judge(url, "m", max_retries=0, seconds=3.0).grade("q", "a")


@pytest.mark.parametrize("status", [429, 500])
def test_a_judge_that_asks_to_wait_or_fails_is_asked_again_with_the_key_of_its_url(monkeypatch, status):
    """The run's own has a key of its own: the user's is for the user's endpoint alone."""
    monkeypatch.setattr("rl.envs.judge._PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("JUDGE_API_KEY", "users")
    monkeypatch.delenv("RL_JUDGE_API_KEY", raising=False)
    with endpoint(status, "4", "5", "6") as (url, asked):
        assert Judge(url, "m").grade("q", "a").grade == 0.4
        monkeypatch.setenv("RL_JUDGE_URL", url)
        assert Judge().grade("q", "a").grade == 0.5
        monkeypatch.setenv("RL_JUDGE_API_KEY", "own")
        assert Judge().grade("q", "a").grade == 0.6
    keys = ["users", "users", "none", "own"]
    assert [body["key"] for body in asked] == [f"Bearer {key}" for key in keys]
