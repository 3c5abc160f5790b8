"""Servers of JSON that tests play against: a policy or a judge behind OpenAI's chat completions."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JSONHandler(BaseHTTPRequestHandler):
    """Answers each POST with what `answer` makes of its body."""

    protocol_version = "HTTP/1.1"

    def answer(self, asked: dict) -> dict:
        raise NotImplementedError

    def do_POST(self):
        self.reply(200, self.answer(self.body()))

    def body(self) -> dict:
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def reply(self, code: int, answer: dict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def completion(message: dict) -> dict:
    """A chat completion with this message of the assistant's."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "0", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage,
    }  # fmt: skip


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """On a free port of 127.0.0.1, `server_port`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True  # connections may stay open
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # how often it looks whether it ends
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
