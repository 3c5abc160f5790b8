"""AgentEnv: a program that talks to the policy through OpenAI's API, and is trained as it is."""

import importlib.util
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import IO

from rl.envs.base import Env, RolloutContext
from rl.envs.chat.env import ChatEnv
from rl.envs.chat.episode import Episode
from rl.envs.chat.loop import play_agents
from rl.envs.variables import clean_variables
from rl.interfaces import Door, Tokenizer
from rl.types import Message, Problem, Prompt, Rollout

_SHOWN = 2000


def door_for(env: Env, tokenizer: Tokenizer, address: str = "127.0.0.1") -> Door | None:
    """Where an AgentEnv's agents find the policy; other environments have none. Listens on this address."""
    if not isinstance(env, AgentEnv):
        return None
    from rl.envs.chat.endpoint import AgentEndpoint  # a web server, which only agents need

    return AgentEndpoint(tokenizer, address)


@dataclass(frozen=True)
class AgentEnv(ChatEnv):
    """Derive from this class, implement `generate`, a reward, and `agent`; or give a `command`.

    The agent runs in the episode's process and may use any library; the policy is at `base_url`, under any
    model name. What it sampled is what is trained on, whatever the agent does with it.
    """

    command: tuple[str, ...] = ()
    """The agent as a program, in a virtual environment of its own if it likes: it finds OPENAI_BASE_URL and
    OPENAI_API_KEY in its environment and the problem as JSON on standard input; what it prints is
    episode.state["output"]. Of other variables it gets those that programs need to run, no keys."""
    variables: tuple[str, ...] = ()
    """Names of variables that the agent's programs get beside the ordinary ones, such as that of a key."""

    def unread(self) -> Mapping[str, str]:
        if not self.command:
            return {"variables": "without env.command; remove it, or give the command"}
        return dict.fromkeys(
            ("prompt_prefix", "max_result_chars"),
            "on env.command, which asks and calls by itself; remove it",
        )

    def prepare(self) -> None:
        """What OpenAI's client loads at its first request is loaded once, before episodes fork."""
        if not self.command and importlib.util.find_spec("openai") is not None:
            _load_openai()

    def agent(self, episode: Episode, base_url: str, api_key: str) -> Awaitable[None] | None:
        """Solve the problem. May be async. What it leaves in episode.state the reward can read."""
        if not self.command:
            raise NotImplementedError(
                "an AgentEnv needs env.command, or agent(self, episode, base_url, api_key)"
            )
        settings = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        program = os.path.expanduser(self.command[0])
        with _file() as output, _file() as errors:
            done = subprocess.run(
                [program, *self.command[1:]],
                env={**clean_variables(self.variables), **settings},
                # By a pipe, which is empty once it is read: what the program starts finds no answer there.
                input=json.dumps(asdict(episode.problem)),
                text=True,
                stdout=output,
                stderr=errors,
            )
            episode.state["output"] = _written(output)
            if done.returncode:
                why = _written(errors)[-_SHOWN:]
                raise RuntimeError(f"the agent ended with code {done.returncode}: {why}")
        return None

    def most_sampled(self, longest: int) -> int:
        """Each of its conversations may be as long as a sequence."""
        return self.max_new_tokens * self.max_turns

    def opening(self, problem: Problem) -> list[Message]:
        """Nothing: the agent begins the conversation."""
        return []

    async def drive(self, prompt: Prompt, n: int, context: RolloutContext) -> Sequence[Rollout]:
        return await play_agents(self, prompt.problem, n, context)


def _file() -> IO[str]:
    """For a program's output. Unlike a pipe, reading it does not wait for what the program leaves behind."""
    return tempfile.TemporaryFile("a+", errors="replace")


def _written(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


class _OneAnswer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": ""}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "0", "object": "chat.completion", "created": 0, "model": "none", "choices": [choice]}
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        pass


def _load_openai() -> None:
    """A request to a server of our own: processes that fork from this one save 0.1 s at their first."""
    import openai

    with HTTPServer(("127.0.0.1", 0), _OneAnswer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        direct = openai.DefaultHttpxClient(trust_env=False)  # a proxy has no way to it
        with openai.OpenAI(base_url=url, api_key="none", http_client=direct) as client:
            client.chat.completions.create(model="none", messages=[{"role": "user", "content": ""}])
        thread.join()
