"""A session with a server that breaks: the server's failure where it is gone, else the policy's."""

import threading
from http.server import BaseHTTPRequestHandler

import pytest

import rl.envs.adapters.sessions as module
from rl.envs.adapters.sessions import broken_session
from rl.envs.chat.episode import ServerLost
from tests.json_server import serving
from tests.ports import free_port


def server_of(status):
    """Answers /health alone, by this status; with none it never does."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/health"
            if status is None:
                self.server.silent.wait(30)
                return
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    return Health


@pytest.mark.parametrize("status", [200, 204, 401, 404, 405, 500, 501])
def test_a_server_that_answers_has_ended_this_session_alone(status):
    with serving(server_of(status)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        error = broken_session("OpenEnv", url + "/", KeyError("x"))
    assert type(error) is RuntimeError
    assert str(error) == f"the OpenEnv server {url}/ ended this episode's session (KeyError: 'x')"


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_that_answers_for_it_says_that_it_is_gone(status):
    with serving(server_of(status)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        error = broken_session("OpenEnv", url, KeyError("x"))
    assert type(error) is ServerLost and str(error) == f"the OpenEnv server {url} is gone (KeyError: 'x')"


def test_so_does_nobody_there_and_no_answer_in_time(monkeypatch):
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    nobody = f"http://127.0.0.1:{free_port()}"
    assert type(broken_session("NeMo Gym", nobody, KeyError("x"))) is ServerLost
    with serving(server_of(None)) as server:
        server.silent = threading.Event()
        silent = broken_session("NeMo Gym", f"http://127.0.0.1:{server.server_port}", KeyError("x"))
        server.silent.set()
    assert type(silent) is ServerLost
